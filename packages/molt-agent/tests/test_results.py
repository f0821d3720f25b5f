"""Which Results count."""

from decimal import Decimal
from fractions import Fraction
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from molt.agents import InvalidResultError, Result, SamplingParams
from molt.agents.results import MAX_INFO_BYTES, check_result


class Scalar(float):
    """Stands for a scalar of a numeric library."""


@given(st.floats(allow_nan=False, allow_infinity=False) | st.integers(-(10**9), 10**9))
def test_finite_numbers_are_rewards(reward: float):
    checked = check_result(Result(reward))
    assert checked.reward == reward
    assert type(checked.reward) is float


@pytest.mark.parametrize(
    ("reward", "reason"),
    [
        (float("nan"), "reward is nan"),
        (float("inf"), "reward is inf"),
        (True, "reward is a bool"),
        ("1.0", "reward is a str"),
        (None, "reward is None"),
        (Decimal(1), "reward is a Decimal"),
        (10**400, "reward is too large"),
    ],
)
def test_anything_else_is_refused_with_the_reason(reward: Any, reason: str):
    with pytest.raises(InvalidResultError, match=reason):
        check_result(Result(reward))


def test_real_numbers_of_other_types_become_floats():
    checked = check_result(Result(Fraction(1, 4), score=Scalar(0.5)))  # type: ignore[arg-type]
    assert (checked.reward, checked.score) == (0.25, 0.5)
    assert type(checked.score) is float


def test_the_score_is_checked_too():
    with pytest.raises(InvalidResultError, match="score is nan"):
        check_result(Result(1.0, score=float("nan")))


def test_what_is_no_result_is_refused():
    with pytest.raises(InvalidResultError, match=r"returned a float \(0.5\): return a molt.agents.Result"):
        check_result(0.5)
    with pytest.raises(InvalidResultError, match="returned None"):
        check_result(None)
    with pytest.raises(InvalidResultError, match="sampling_params is a dict"):
        check_result(Result(1.0, sampling_params={"max_tokens": 4}))  # type: ignore[arg-type]
    assert check_result(Result(1.0, sampling_params=SamplingParams())).sampling_params == SamplingParams()


def test_info_becomes_plain_json():
    info = {"ratio": Fraction(1, 2), "path": object, (7, 8): (1, 2), "nan": float("nan"), "nested": {"set": {3}}}
    plain = check_result(Result(1.0, info=info)).info  # type: ignore[arg-type]
    assert plain == {"ratio": 0.5, "path": "<class 'object'>", "(7, 8)": [1, 2], "nan": None, "nested": {"set": [3]}}


def test_info_that_cannot_be_sent_is_refused():
    cyclic: dict[str, Any] = {}
    cyclic["self"] = cyclic
    for info, reason in (
        (cyclic, "cannot be written as JSON"),
        ({"key": "\ud800"}, "cannot be written as JSON"),
        ({"long": "x" * MAX_INFO_BYTES}, "bytes as JSON"),
        ([1], "info is a list"),
    ):
        with pytest.raises(InvalidResultError, match=reason):
            check_result(Result(1.0, info=info))  # type: ignore[arg-type]


def test_defaults_are_those_of_a_finished_episode():
    result = Result(reward=1.0)
    assert msgspec.structs.asdict(result) == {
        "reward": 1.0,
        "terminated": True,
        "truncated": False,
        "observation": None,
        "images": (),
        "info": {},
        "score": None,
        "sampling_params": None,
    }
