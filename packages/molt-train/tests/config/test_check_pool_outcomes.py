"""Policies about outcomes that do nothing."""
# ruff: noqa: TID252 - the folders of tests are no installed package

import pytest

from .refusals import refusal


@pytest.mark.parametrize("name", ["on_failed", "on_timeout", "on_truncated"])
def test_a_retry_needs_attempts(name):
    assert refusal(f"pool.{name}=retry", "pool.max_attempts=1") == (
        f"pool.{name} is 'retry', which has no effect with pool.max_attempts 1: set pool.{name} to 'mask', or "
        "pool.max_attempts to 2 or more"
    )
    assert refusal(f"pool.{name}=retry", "pool.max_attempts=2") is None


def test_attempts_need_something_that_is_retried():
    never = "pool.on_infrastructure=mask"
    assert refusal("pool.max_attempts=5") is None
    assert refusal("pool.max_attempts=5", never) == (
        "pool.max_attempts is 5, which has no effect when no outcome is retried: leave it out, or set "
        "pool.on_infrastructure to 'retry'"
    )
    assert refusal("pool.max_attempts=5", never, "pool.on_timeout=retry") is None
    assert refusal("pool.max_attempts=5", never, "eval.path=held_out.jsonl") is None, "evaluations retry outages always"
    assert refusal(never) is None


def test_an_outage_is_no_reward():
    assert "pool.on_infrastructure" in refusal("pool.on_infrastructure=train")
