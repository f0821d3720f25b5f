"""Checkpoints of the actor: a resumed one goes on as if it had never stopped, and its weights can be served."""

import math
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from molt.train.actor import checkpoint
from molt.train.actor.model import Policy
from molt.train.actor.optimizer import make_optimizer, make_schedule
from molt.train.actor.step import Trainer
from molt.train.config import OptimizerConfig
from molt.train.errors import ActorError

pytestmark = pytest.mark.usefixtures("process_group")

SETTINGS = OptimizerConfig(lr=0.1, schedule="cosine", warmup_steps=2)


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Linear(3, 2)
        self.dropout = torch.nn.Dropout(0.5)


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


def trainer_without_drawing():
    state = torch.get_rng_state()
    made = trainer(0)
    torch.set_rng_state(state)
    return made


def train(made, num_steps):
    for i in range(num_steps):
        made.optimizer.zero_grad()
        model = made.policy.model
        model.dropout(model.inner(torch.tensor([[1.0, -2.0, float(i)]]))).square().sum().backward()
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
    first, second = trainer(0), trainer(1)
    train(first, 3)
    checkpoint.save(first, tmp_path / "step-000003", step=3, source=source, progress={"kl_coef": 0.1 + 0.2})
    train(first, 8)  # on from the save, without a stop
    torch.manual_seed(99)
    assert checkpoint.load(second, tmp_path / "step-000003") == (3, {"kl_coef": 0.1 + 0.2})
    assert second.optimizer.param_groups[0]["lr"] == pytest.approx(0.1 * 0.5 * (1 + math.cos(math.pi / 6)))
    train(second, 8)
    for old, new in zip(first.policy.model.parameters(), second.policy.model.parameters(), strict=True):
        assert torch.equal(old, new), "weights, AdamW's moments, the schedule and dropout's random numbers are all back"


def test_a_critic_lies_in_the_same_checkpoint_and_comes_back_whole(tmp_path, source):
    actor, first, second = trainer(0), trainer(1), trainer(2)
    train(first, 2)
    checkpoint.save(actor, tmp_path / "c", step=2, source=source, progress={})
    checkpoint.save_critic(first, tmp_path / "c", step=2)
    train(first, 4)
    checkpoint.load_critic(second, tmp_path / "c")
    train(second, 4)
    for old, new in zip(first.policy.model.parameters(), second.policy.model.parameters(), strict=True):
        assert torch.equal(old, new)
    weights = load_file(tmp_path / "c" / "model" / "model.safetensors")
    assert torch.equal(weights["inner.weight"], actor.policy.model.inner.weight), "what is served is the policy"


def test_a_checkpoint_of_a_run_without_a_critic_is_no_critic_s(tmp_path, source):
    checkpoint.save(trainer(0), tmp_path / "step-000003", step=3, source=source, progress={})
    with pytest.raises(ActorError, match="step-000003 holds no critic"):
        checkpoint.load_critic(trainer(0), tmp_path / "step-000003")


def test_a_rank_that_the_checkpoint_did_not_have_draws_from_its_own_seed(tmp_path, source):
    checkpoint.save(trainer(0), tmp_path / "c", step=1, source=source, progress={})
    for state in (tmp_path / "c" / "state").glob("random-*.pt"):
        state.unlink()
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    made = trainer_without_drawing()
    checkpoint.load(made, tmp_path / "c")
    assert torch.equal(torch.rand(3), expected)


def test_the_weights_lie_beside_it_as_a_hugging_face_folder(tmp_path, source):
    made = trainer(0)
    checkpoint.save(made, tmp_path / "c", step=1, source=source, progress={})
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


def test_a_tied_weight_is_written_once_as_hugging_face_does(tmp_path, source):
    made = trainer(0)
    model = made.policy.model
    model.outer = torch.nn.Linear(3, 2, bias=False)
    model.outer.weight = model.inner.weight
    checkpoint.export(made, tmp_path / "m", source=source)
    assert load_file(tmp_path / "m" / "model.safetensors").keys() == {"inner.weight", "inner.bias"}
