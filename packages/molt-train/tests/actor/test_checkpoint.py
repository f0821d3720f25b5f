"""Checkpoints of the actor: a resumed one goes on as if it had never stopped, and its weights can be served."""

from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from molt.train.actor import checkpoint
from molt.train.actor.model import Policy
from molt.train.actor.optimizer import make_optimizer, make_schedule
from molt.train.actor.step import Trainer
from molt.train.config import OptimizerConfig

pytestmark = pytest.mark.usefixtures("process_group")

SETTINGS = OptimizerConfig(lr=0.1, schedule="cosine", warmup_steps=2)


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Linear(3, 2)


def trainer(seed):
    torch.manual_seed(seed)
    model = Net()
    optimizer = make_optimizer(model, SETTINGS)
    policy = Policy(model=model, device=torch.device("cpu"), mesh=SimpleNamespace(), compute_dtype=torch.float32)
    return Trainer(
        policy=policy,
        optimizer=optimizer,
        schedule=make_schedule(optimizer, SETTINGS, num_steps=8),
        max_grad_norm=1.0,
        temperature=1.0,
    )


def train(made, num_steps):
    for i in range(num_steps):
        made.optimizer.zero_grad()
        made.policy.model.inner(torch.tensor([[1.0, -2.0, float(i)]])).square().sum().backward()
        made.optimizer.step()
        made.schedule.step()


@pytest.fixture
def source(tmp_path):
    """The folder that a policy was loaded from."""
    folder = tmp_path / "source"
    folder.mkdir()
    for name in ("config.json", "tokenizer.json", "model.safetensors", "pytorch_model.bin", "x.safetensors.index.json"):
        (folder / name).write_text(name)
    return str(folder)


def test_a_resumed_actor_goes_on_as_if_it_had_never_stopped(tmp_path, source):
    straight, first, second = trainer(0), trainer(0), trainer(1)
    train(straight, 3)
    train(first, 3)
    checkpoint.save(first, tmp_path / "step-000003", step=3, source=source)
    assert checkpoint.load(second, tmp_path / "step-000003") == 3
    assert second.optimizer.param_groups[0]["lr"] == straight.optimizer.param_groups[0]["lr"]
    train(straight, 3)
    train(second, 3)
    for old, new in zip(straight.policy.model.parameters(), second.policy.model.parameters(), strict=True):
        assert torch.equal(old, new), "weights, AdamW's moments and the schedule are all back"


def test_the_weights_lie_beside_it_as_a_hugging_face_folder(tmp_path, source):
    made = trainer(0)
    checkpoint.save(made, tmp_path / "c", step=1, source=source)
    folder = tmp_path / "c" / "model"
    weights = load_file(folder / "model.safetensors")
    assert weights.keys() == {"inner.weight", "inner.bias"}
    assert torch.equal(weights["inner.weight"], made.policy.model.inner.weight)
    assert sorted(file.name for file in folder.iterdir()) == ["config.json", "model.safetensors", "tokenizer.json"]


def test_of_a_policy_on_the_hub_the_files_are_those_that_loading_left_here(tmp_path, source, monkeypatch):
    asked = []

    def snapshot_download(name, *, ignore_patterns):
        asked.append((name, ignore_patterns))
        return str(source)

    monkeypatch.setattr(checkpoint, "snapshot_download", snapshot_download)
    checkpoint.export(trainer(0), tmp_path / "m", source="org/name")
    assert asked[0][0] == "org/name"
    assert "*.safetensors" in asked[0][1], "the weights are not fetched for it"
    assert sorted(file.name for file in (tmp_path / "m").iterdir()) == [
        "config.json",
        "model.safetensors",
        "tokenizer.json",
    ]


def test_weights_are_written_under_their_hugging_face_names(tmp_path):
    made = trainer(0)
    made.policy.model.state_dict_adapter = SimpleNamespace(
        to_hf=lambda weights: {f"model.{name}": tensor for name, tensor in weights.items()}
    )
    assert checkpoint.full_weights(made.policy.model).keys() == {"model.inner.weight", "model.inner.bias"}
