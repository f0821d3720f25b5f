"""Keys of the evaluation that contradict each other or do nothing: each refused in one line with key, value and fix."""
# ruff: noqa: TID252 - the folders of tests are no installed package

import pytest

from .refusals import refusal

ROWS = "eval.path=held_out.jsonl"


@pytest.mark.parametrize(
    "key", ["every=5", "samples=2", "threshold=0.5", "max_tokens=9", "temperature=0.0", "top_p=0.9", "keep_best=true"]
)
def test_a_key_needs_held_out_rows(key):
    name, _, value = key.partition("=")
    value = value.replace("true", "True")
    assert refusal(f"eval.{key}") == (
        f"eval.{name} is {value}, which has no effect without held-out rows: give eval.path or [[eval.sets]], or "
        "leave it out"
    )


def test_an_evaluation_has_a_sampling_of_its_own():
    assert refusal(ROWS, "eval.temperature=0.0", "eval.max_tokens=5") is None
    assert refusal(ROWS, "eval.top_p=0.5", "eval.samples=8") is None
    assert refusal(ROWS, "eval.temperature=-0.5").startswith("eval.temperature is -0.5; it must not be negative")
    assert refusal(ROWS, "eval.top_p=1.5") == "eval.top_p is 1.5; it must be above 0 and at most 1"
    assert refusal(ROWS, "eval.top_p=0.5", "eval.temperature=0.0").startswith("eval.top_p is 0.5, which has no effect")


def test_every_row_is_used_so_that_weights_do_nothing():
    sets = '[{name = "a", path = "a.jsonl", weight = 2.0}]'
    assert refusal(f"eval.sets={sets}").startswith("eval.sets[0].weight is 2.0, which has no effect")


def test_the_best_checkpoint_is_one_of_several_each_evaluated_alone():
    assert refusal(ROWS, "eval.keep_best=true", "eval.every=5") is None
    assert refusal(ROWS, "eval.keep_best=true").startswith("eval.keep_best is true, which has no effect with eval.ev")
    message = refusal(ROWS, "eval.keep_best=true", "eval.every=5", "eval.pinned=false")
    assert message.startswith("eval.keep_best is true, but with eval.pinned false")


def test_training_that_goes_on_needs_evaluations_in_between():
    assert refusal(ROWS, "eval.pinned=false", "eval.every=5") is None
    assert refusal(ROWS, "eval.pinned=false").startswith("eval.pinned is false, but with eval.every 0")
