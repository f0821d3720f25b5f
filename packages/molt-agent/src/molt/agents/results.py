"""Result: what an agent, or one step of an environment, gives back."""

import math
import numbers
from collections.abc import Callable, Sequence
from typing import Any, cast

import msgspec

from molt.agents.errors import InvalidResultError
from molt.agents.protocol import SamplingParams

MAX_INFO_BYTES = 1 << 20
"""Most bytes of `info` as JSON: it travels with every result."""
MAX_ANSWER_BYTES = 4 << 20
"""Most bytes of an answer as JSON, for the same reason."""


class Result(msgspec.Struct, frozen=True):
    """How good the outcome was, in the manner of Gymnasium.

    A `ChatAgent` needs `reward` alone. The other fields are for `Env.step`, except `truncated`, `score` and `info`,
    which mean the same in both.
    """

    reward: float
    """A finite number. The rewards of an environment's steps are summed over the episode."""
    terminated: bool = True
    """The episode is over. False asks for another turn, and needs an `observation`."""
    truncated: bool = False
    """The episode was cut short (turn or token limit); the attempt counts as `truncated`, with its reward."""
    observation: str | Sequence[Any] | None = None
    """What the policy sees next: text, sent as one user message, or a list of chat messages, sent as they are."""
    images: Sequence[str] = ()
    """URLs (`data:` or `https:`) that accompany an observation given as text."""
    info: dict[str, Any] = msgspec.field(default_factory=dict[str, Any])
    """Anything worth recording. Made JSON: numbers of other libraries become floats, other objects their repr."""
    score: float | None = None
    """What to evaluate by, where it differs from the reward."""
    sampling_params: SamplingParams | None = None
    """How to sample the next turn, instead of the session's own parameters."""


def check_result(result: object) -> Result:
    """Give back `result` with reward and score as floats and info as plain JSON.

    Raises:
        InvalidResultError: It is no Result, a number is not finite, or info cannot be written as JSON.
    """
    if not isinstance(result, Result):
        raise InvalidResultError(f"the agent returned {_kind(result)}: return a molt.agents.Result")
    if not isinstance(cast("object", result.sampling_params), SamplingParams | None):
        raise InvalidResultError(f"sampling_params is {_kind(result.sampling_params)}: pass a SamplingParams")
    return msgspec.structs.replace(
        result,
        reward=_finite(result.reward, "reward"),
        score=None if result.score is None else _finite(result.score, "score"),
        info=_plain_info(result.info),
    )


def check_answer(answer: object) -> Any:
    """Give back an answer as plain JSON: what its grader sees is what can be graded again.

    Raises:
        InvalidResultError: It is None, cannot be written as JSON, or is too long.
    """
    if answer is None:
        raise InvalidResultError("the agent returned None: return a molt.agents.Result, or the answer that it grades")
    return _plain_json(answer, "the answer", max_bytes=MAX_ANSWER_BYTES, enc_hook=_plain_number)


def check_grade(grade: object) -> Result:
    """Give back what a grader returned, a Result or a number, as a checked Result.

    Raises:
        InvalidResultError: It is neither, or not valid; see `check_result`.
    """
    if isinstance(grade, Result):
        return check_result(grade)
    if isinstance(grade, bool) or not isinstance(grade, numbers.Real):
        raise InvalidResultError(f"grade returned {_kind(grade)}: return a number, or a molt.agents.Result")
    return Result(_finite(grade, "the grade"))


def _finite(value: object, name: str) -> float:
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise InvalidResultError(f"{name} is {_kind(value)}: pass a float")
    try:
        number = float(value)
    except OverflowError:
        raise InvalidResultError(f"{name} is too large for a float") from None
    if not math.isfinite(number):
        raise InvalidResultError(f"{name} is {number}: pass a finite number")
    return number


def _plain_info(info: object) -> dict[str, Any]:
    if not isinstance(info, dict):
        raise InvalidResultError(f"info is {_kind(info)}: pass a dict")
    return _plain_json(info, "info", max_bytes=MAX_INFO_BYTES, enc_hook=_plain) if info else {}


def _plain_json(value: Any, name: str, *, max_bytes: int, enc_hook: Callable[[Any], Any]) -> Any:
    try:
        encoded = msgspec.json.encode(value, enc_hook=enc_hook)
    except (TypeError, ValueError, OverflowError, RecursionError) as exc:
        raise InvalidResultError(f"{name} cannot be written as JSON: {exc}") from exc
    if len(encoded) > max_bytes:
        raise InvalidResultError(f"{name} takes {len(encoded)} bytes as JSON: keep it under {max_bytes}")
    return msgspec.json.decode(encoded)


def _plain(value: object) -> Any:
    return float(value) if isinstance(value, numbers.Real) else repr(value)


def _plain_number(value: object) -> float:
    if isinstance(value, numbers.Real):
        return float(value)
    raise TypeError(f"it holds {_kind(value)}")


def _kind(value: object) -> str:
    return "None" if value is None else f"a {type(value).__name__} ({value!r:.80})"
