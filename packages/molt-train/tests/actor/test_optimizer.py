"""AdamW's and Muon's groups and steps, states kept elsewhere, and the learning rate of each step, by hand."""

import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.multiprocessing
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

from molt.train.actor.offload import backend, fsdp_policy, offload_states
from molt.train.actor.optimizer import Muon, make_optimizer, make_schedule, orthogonalise
from molt.train.config import OptimizerConfig

from .muon_ranks import MUON, net, train  # noqa: TID252

RANKS = Path(__file__).with_name("muon_ranks.py")


def rates(num_steps, *, of=None, **settings):
    """The learning rate with which each of `num_steps` steps is made."""
    settings = OptimizerConfig(lr=1.0, **settings)
    optimizer = make_optimizer(torch.nn.Linear(1, 1), settings)
    schedule = make_schedule(optimizer, settings, num_steps=of or num_steps)
    seen = []
    for _ in range(num_steps):
        seen.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    return pytest.approx(seen)


def test_a_constant_rate_stays():
    assert rates(3) == [1.0, 1.0, 1.0]


def test_a_warm_up_rises_linearly_and_its_first_step_is_not_lost():
    assert rates(6, warmup_steps=4) == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


def test_a_cosine_falls_from_the_peak_to_its_floor():
    assert rates(6, of=4, schedule="cosine", min_lr_ratio=0.2) == [
        1.0,
        0.2 + 0.8 * 0.5 * (1 + math.cos(math.pi / 4)),
        0.6,
        0.2 + 0.8 * 0.5 * (1 + math.cos(3 * math.pi / 4)),
        0.2,
        0.2,  # past its end it does not rise again
    ]


def test_a_cosine_begins_after_the_warm_up():
    assert rates(6, schedule="cosine", warmup_steps=2) == [
        0.5,
        1.0,
        1.0,
        0.5 * (1 + math.sqrt(0.5)),
        0.5,
        0.5 * (1 - math.sqrt(0.5)),
    ]


def test_a_line_falls_by_the_same_amount_each_step_to_its_floor():
    assert rates(6, of=4, schedule="linear", min_lr_ratio=0.2) == [1.0, 0.8, 0.6, 0.4, 0.2, 0.2]


def test_a_line_begins_after_the_warm_up():
    assert rates(6, schedule="linear", warmup_steps=2) == [0.5, 1.0, 1.0, 0.75, 0.5, 0.25]


@pytest.mark.parametrize("schedule", ["cosine", "linear"])
def test_a_warm_up_as_long_as_the_run_is_no_fault(schedule):
    assert rates(2, schedule=schedule, warmup_steps=2) == [0.5, 1.0]


def test_only_matrices_are_decayed():
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.LayerNorm(3))
    decayed, other = make_optimizer(model, OptimizerConfig(weight_decay=0.1)).param_groups
    assert [tuple(p.shape) for p in decayed["params"]] == [(3, 2)]
    assert (decayed["weight_decay"], other["weight_decay"]) == (0.1, 0.0)
    assert len(other["params"]) == 3


def test_the_settings_reach_adamw_and_frozen_weights_do_not():
    model = torch.nn.Sequential(torch.nn.Linear(2, 2, bias=False), torch.nn.Linear(2, 2, bias=False))
    model[0].weight.requires_grad_(requires_grad=False)
    optimizer = make_optimizer(model, OptimizerConfig(lr=0.5, beta1=0.8, beta2=0.9, eps=1e-3))
    (group,) = optimizer.param_groups
    assert (group["lr"], group["betas"], group["eps"]) == (0.5, (0.8, 0.9), 1e-3)
    assert [id(p) for p in group["params"]] == [id(model[1].weight)]


def test_adamw_makes_the_step_of_its_formula():
    weight = torch.nn.Parameter(torch.tensor([[1.0, -2.0]]))
    model = torch.nn.Module()
    model.weight = weight
    optimizer = make_optimizer(model, OptimizerConfig(lr=0.1, beta1=0.9, beta2=0.95, eps=0.5, weight_decay=0.2))
    expected = [1.0, -2.0]
    mean, square = [0.0, 0.0], [0.0, 0.0]
    for step, gradient in enumerate([(3.0, -1.0), (0.5, 2.0)], start=1):
        weight.grad = torch.tensor([gradient])
        optimizer.step()
        for i, g in enumerate(gradient):
            mean[i] = 0.9 * mean[i] + 0.1 * g
            square[i] = 0.95 * square[i] + 0.05 * g * g
            size = math.sqrt(square[i] / (1 - 0.95**step)) + 0.5
            expected[i] = expected[i] * (1 - 0.1 * 0.2) - 0.1 * mean[i] / (1 - 0.9**step) / size
    assert weight.flatten().tolist() == pytest.approx(expected, rel=1e-5)


def test_muon_moves_the_hidden_matrices_and_adamw_everything_else():
    model = net()
    names = {id(p): name for name, p in model.named_parameters()}
    groups = make_optimizer(model, MUON).param_groups
    by_group = [sorted(names[id(p)] for p in group["params"]) for group in groups]
    assert by_group == [
        ["down.weight", "up.weight"],
        ["embed.weight", "experts", "lm_head.weight", "value.weight"],
        ["norm.bias", "norm.weight", "up.bias"],
    ]
    assert [group["weight_decay"] for group in groups] == [0.1, 0.1, 0.0]


def test_a_head_tied_to_the_embeddings_is_no_matrix_of_muons():
    model = net()
    model.lm_head = torch.nn.Linear(5, 7, bias=False)
    model.lm_head.weight = model.embed.weight
    hidden = make_optimizer(model, MUON).param_groups[0]["params"]
    assert [tuple(p.shape) for p in hidden] == [(9, 5), (5, 9)]


def test_muon_makes_the_steps_of_the_maintained_one_and_adamws_beside_it():
    ours, theirs = net(), net()
    matrices = [theirs.up.weight, theirs.down.weight]
    others = [p for p in theirs.parameters() if all(p is not matrix for matrix in matrices)]
    train(ours, make_optimizer(ours, MUON), 3)
    muon = torch.optim.Muon(matrices, lr=0.05, weight_decay=0.1, momentum=0.95, adjust_lr_fn="match_rms_adamw")
    decayed = [{"params": [p for p in others if p.ndim > 1], "weight_decay": 0.1}]
    adamw = torch.optim.AdamW(
        [*decayed, {"params": [p for p in others if p.ndim == 1], "weight_decay": 0.0}],
        lr=0.05,
        betas=(0.9, 0.95),
        fused=True,
    )
    for i in range(3):
        muon.zero_grad()
        adamw.zero_grad()
        theirs(torch.tensor([i % 7, 3, 6])).backward()
        muon.step()
        adamw.step()
    for (name, mine), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert torch.allclose(mine, other, rtol=1.3e-6, atol=1e-5), name


@pytest.mark.parametrize("shape", [(4, 6), (6, 4), (5, 5)])
def test_an_orthogonalised_matrix_keeps_its_directions_and_loses_their_sizes(shape):
    generator = torch.Generator().manual_seed(1)
    matrix = torch.randn(shape, generator=generator)
    left, sizes, right = torch.linalg.svd(matrix, full_matrices=False)
    assert sizes.max() / sizes.min() > 2, "otherwise there would be nothing to lose"
    result = orthogonalise(matrix)
    along = left.T @ result @ right.T
    assert torch.linalg.svdvals(result).sub(1).abs().max() < 0.4, "five iterations bring them near 1, not to it"
    off_axis = along - torch.diag(along.diagonal())
    assert off_axis.abs().max() < 0.05


def test_a_matrix_of_zeros_stays_one():
    assert torch.equal(orthogonalise(torch.zeros(3, 2)), torch.zeros(3, 2))


def test_a_closure_is_evaluated_before_the_step():
    model = net()
    optimizer = make_optimizer(model, MUON)
    before = model.up.weight.detach().clone()

    def closure():
        loss = model(torch.tensor([1, 2]))
        loss.backward()
        return loss.item()

    assert optimizer.step(closure) == pytest.approx(net()(torch.tensor([1, 2])).item())
    assert not torch.equal(model.up.weight, before)


@pytest.fixture(scope="module")
def sharded_run(tmp_path_factory):
    """Three steps of Muon on two ranks of FSDP2, of which one has no row of the value head; the folder they left."""
    folder = tmp_path_factory.mktemp("sharded")
    command = [sys.executable, str(RANKS), str(folder)]
    ranks = [subprocess.Popen([*command, str(rank)]) for rank in range(2)]
    assert [rank.wait(150) for rank in ranks] == [0, 0]
    return folder


@pytest.mark.timeout(180)  # two processes import torch beside what else the machine does
def test_muon_on_two_ranks_makes_the_steps_of_one(sharded_run):
    model = net()
    train(model, make_optimizer(model, MUON), 3)
    for name, whole in torch.load(sharded_run / "weights").items():
        assert torch.allclose(whole, model.get_parameter(name), rtol=1e-5, atol=1e-6), name


@pytest.mark.timeout(180)
def test_muon_goes_on_from_a_checkpoint_of_two_ranks_on_one(sharded_run, process_group):
    straight, resumed = net(), net()
    optimizer = make_optimizer(straight, MUON)
    train(straight, optimizer, 3)
    resumed.load_state_dict(straight.state_dict())
    again = make_optimizer(resumed, MUON)
    state = {"optimizer": get_optimizer_state_dict(resumed, again)}
    dcp.load(state, checkpoint_id=str(sharded_run / "checkpoint"))
    set_optimizer_state_dict(resumed, again, state["optimizer"])
    train(straight, optimizer, 2, first=3)
    train(resumed, again, 2, first=3)
    for (name, one), other in zip(straight.named_parameters(), resumed.parameters(), strict=True):
        torch.testing.assert_close(one, other, msg=name, rtol=1e-5, atol=1e-6)
    assert isinstance(again, Muon)


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_states_lie_elsewhere_between_steps_and_single_numbers_stay(name):
    """`meta` stands in for host memory: nothing comes back from it, so only the first step can be seen."""
    model = net()
    optimizer = make_optimizer(model, OptimizerConfig(name=name, lr=0.05))
    offload_states(optimizer, home=torch.device("meta"))
    train(model, optimizer, 1)
    devices = {key: value.device.type for key, value in optimizer.state[model.embed.weight].items()}
    assert devices == {"step": "cpu", "exp_avg": "meta", "exp_avg_sq": "meta"}
    assert {value.device.type for value in optimizer.state[model.up.weight].values() if value.ndim} == {"meta"}


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_steps_with_states_kept_elsewhere_are_the_same_steps(name):
    plain, offloaded = net(), net()
    settings = OptimizerConfig(name=name, lr=0.05)
    optimizer, other = make_optimizer(plain, settings), make_optimizer(offloaded, settings)
    offload_states(other)
    train(plain, optimizer, 3)
    train(offloaded, other, 3)
    for one, two in zip(plain.parameters(), offloaded.parameters(), strict=True):
        assert torch.equal(one, two)


def test_loaded_states_go_where_states_are_kept():
    model, settings = net(), OptimizerConfig(lr=0.05)
    optimizer = make_optimizer(model, settings)
    train(model, optimizer, 1)
    resumed = make_optimizer(model, settings)
    offload_states(resumed, home=torch.device("meta"))
    resumed.load_state_dict(optimizer.state_dict())
    assert resumed.state[model.embed.weight]["exp_avg"].device.type == "meta"


def test_only_full_offload_asks_anything_of_fsdp_and_of_the_process_group():
    assert [fsdp_policy(offload) is not None for offload in ("none", "optimizer", "full")] == [False, False, True]
    assert [backend(offload, has_cuda=True) for offload in ("none", "optimizer", "full")] == [
        "nccl",
        "nccl",
        "cpu:gloo,cuda:nccl",
    ]
    assert backend("none", has_cuda=False) == "gloo"
