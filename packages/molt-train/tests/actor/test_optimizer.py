"""AdamW's groups, and the learning rate of each optimizer step, by hand."""

import math

import pytest
import torch

from molt.train.actor.optimizer import make_optimizer, make_schedule
from molt.train.config import OptimizerConfig


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


def test_a_warm_up_as_long_as_the_run_is_no_fault():
    assert rates(2, schedule="cosine", warmup_steps=2) == [0.5, 1.0]


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
