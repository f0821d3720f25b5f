"""Checkpoints: sharded state by torch.distributed.checkpoint to resume from, and a Hugging Face folder to serve."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed.checkpoint as dcp
from huggingface_hub import snapshot_download
from safetensors.torch import save_file
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)

from molt.train.actor.step import Trainer
from molt.train.errors import ActorError

STATE = "state"
CRITIC = "critic"
HUGGING_FACE = "model"
_WEIGHTS = ("*.safetensors", "*.bin", "*.safetensors.index.json", "*.pt")


def save(trainer: Trainer, folder: Path, *, step: int, source: str, progress: Mapping[str, Any]) -> None:
    """Write the state after update `step`, and the weights as a Hugging Face folder beside it. All ranks call this.

    `source` is what the policy was loaded from, a folder or a hub name; its config, tokenizer and chat template go with
    the weights. `progress` is the controller's own, JSON values by name, which `load` gives back.
    """
    _write(trainer, folder / STATE, step=step, progress=progress)
    export(trainer, folder / HUGGING_FACE, source=source)


def load(trainer: Trainer, folder: Path) -> tuple[int, dict[str, Any]]:
    """Restore what `save` wrote, on any number of ranks. Returns its step, and the controller's progress."""
    return _read(trainer, folder / STATE)


def save_critic(trainer: Trainer, folder: Path, *, step: int) -> None:
    """Write the state of the critic after update `step` into the same checkpoint. All ranks of the critic call this."""
    _write(trainer, folder / CRITIC, step=step, progress={})


def load_critic(trainer: Trainer, folder: Path) -> None:
    """Restore what `save_critic` wrote. Raises ActorError for a checkpoint of a run without a critic."""
    if not (folder / CRITIC).is_dir():
        raise ActorError(f"the checkpoint {folder.name} holds no critic: resume with the algorithm.estimator it had")
    _read(trainer, folder / CRITIC)


def _write(trainer: Trainer, folder: Path, *, step: int, progress: Mapping[str, Any]) -> None:
    """Model, optimizer, schedule and progress, sharded; and of each rank the state of its random numbers."""
    dcp.save(_state(trainer, step, progress), checkpoint_id=str(folder))
    torch.save(_random_state(), folder / _random_name())


def _read(trainer: Trainer, folder: Path) -> tuple[int, dict[str, Any]]:
    state = _state(trainer, 0, {})
    dcp.load(state, checkpoint_id=str(folder))
    set_state_dict(
        trainer.policy.model,
        trainer.optimizer,
        model_state_dict=state["model"],
        optim_state_dict=state["optimizer"],
    )
    saved = state["progress"]
    trainer.schedule.load_state_dict(json.loads(saved["schedule"]))
    for group, lr in zip(trainer.optimizer.param_groups, trainer.schedule.get_last_lr(), strict=True):
        group["lr"] = lr
    if (folder / _random_name()).exists():  # not where there are more ranks now, which begin with their own seeds
        _restore_random(torch.load(folder / _random_name(), weights_only=True))
    return int(saved["step"]), json.loads(saved["controller"])


def _state(trainer: Trainer, step: int, progress: Mapping[str, Any]) -> dict[str, Any]:
    model, optimizer = get_state_dict(trainer.policy.model, trainer.optimizer)
    saved = {
        "step": step,
        "schedule": json.dumps(trainer.schedule.state_dict()),
        "controller": json.dumps(dict(progress)),
    }
    return {"model": model, "optimizer": optimizer, "progress": saved}


def _random_name() -> str:
    return f"random-{torch.distributed.get_rank()}.pt"


def _random_state() -> dict[str, torch.Tensor]:
    """Of the generators that dropout draws from."""
    state = {"cpu": torch.get_rng_state()}
    return state | ({"cuda": torch.cuda.get_rng_state()} if torch.cuda.is_available() else {})


def _restore_random(state: Mapping[str, torch.Tensor]) -> None:
    torch.set_rng_state(state["cpu"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


def export(trainer: Trainer, folder: Path, *, source: str) -> None:
    """Write the weights under their Hugging Face names. All ranks call this; rank 0 writes."""
    weights = full_weights(trainer.policy.model)
    if torch.distributed.get_rank() == 0:
        folder.mkdir(parents=True, exist_ok=True)
        shutil.copytree(_local(source), folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns(*_WEIGHTS))
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    torch.distributed.barrier()


def _local(source: str) -> Path:
    """The folder of a policy; of one on the hub, what loading it has left on this machine."""
    if Path(source).is_dir():
        return Path(source)
    return Path(snapshot_download(source, ignore_patterns=list(_WEIGHTS)))


def full_weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Every weight under its Hugging Face name, whole, on the CPU of rank 0 (empty on other ranks); a tied one once."""
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights = cast("dict[str, torch.Tensor]", get_model_state_dict(model, options=options))
    once = {name for name, _ in model.named_parameters()}
    tied = {name for name, _ in model.named_parameters(remove_duplicate=False)} - once
    weights = {name: tensor for name, tensor in weights.items() if name not in tied}
    adapter = getattr(model, "state_dict_adapter", None)
    if adapter is not None and weights:
        weights = adapter.to_hf(weights)
    return {name: tensor.contiguous() for name, tensor in weights.items()}
