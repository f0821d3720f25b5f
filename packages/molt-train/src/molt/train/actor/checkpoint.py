"""Checkpoints: sharded state by torch.distributed.checkpoint to resume from, and a Hugging Face folder to serve."""

import json
import shutil
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

STATE = "state"
HUGGING_FACE = "model"
_WEIGHTS = ("*.safetensors", "*.bin", "*.safetensors.index.json", "*.pt")


def save(trainer: Trainer, folder: Path, *, step: int, source: str) -> None:
    """Write the state after update `step`, and the weights as a Hugging Face folder beside it. All ranks call this.

    `source` is what the policy was loaded from, a folder or a hub name; its config, tokenizer and chat template go with
    the weights.
    """
    dcp.save(_state(trainer, step), checkpoint_id=str(folder / STATE))
    export(trainer, folder / HUGGING_FACE, source=source)


def load(trainer: Trainer, folder: Path) -> int:
    """Restore what `save` wrote, on any number of ranks. Returns its step."""
    state = _state(trainer, 0)
    dcp.load(state, checkpoint_id=str(folder / STATE))
    set_state_dict(
        trainer.policy.model,
        trainer.optimizer,
        model_state_dict=state["model"],
        optim_state_dict=state["optimizer"],
    )
    trainer.schedule.load_state_dict(json.loads(state["progress"]["schedule"]))
    for group, lr in zip(trainer.optimizer.param_groups, trainer.schedule.get_last_lr(), strict=True):
        group["lr"] = lr
    return int(state["progress"]["step"])


def _state(trainer: Trainer, step: int) -> dict[str, Any]:
    model, optimizer = get_state_dict(trainer.policy.model, trainer.optimizer)
    progress = {"step": step, "schedule": json.dumps(trainer.schedule.state_dict())}
    return {"model": model, "optimizer": optimizer, "progress": progress}


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
    """Every weight under its Hugging Face name, whole, on the CPU of rank 0 (empty on other ranks)."""
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights = cast("dict[str, torch.Tensor]", get_model_state_dict(model, options=options))
    adapter = getattr(model, "state_dict_adapter", None)
    if adapter is not None and weights:
        weights = adapter.to_hf(weights)
    return {name: tensor.contiguous() for name, tensor in weights.items()}
