"""Stage 7, advantage: one short file an estimator, each a pure function from a `RolloutBatch` to `Advantages`.

A new one needs no change here: `algorithm.estimator` also takes `FILE.py:FUNCTION` and `module:FUNCTION`. It sees
rewards, groups and action counts, and the KL penalties of `algorithm.kl_placement` `reward`.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import numpy as np
import torch
from torch import Tensor

from molt.train.advantage.batch import Advantages, EstimatorSettings, RolloutBatch, refuse_discount
from molt.train.advantage.batch_mean import batch_mean
from molt.train.advantage.custom import load_function
from molt.train.advantage.distillation import distillation
from molt.train.advantage.gae import gae
from molt.train.advantage.group_mean import group_mean
from molt.train.advantage.grpo import grpo
from molt.train.advantage.reinforce import reinforce
from molt.train.advantage.reinforce_pp import reinforce_pp
from molt.train.advantage.reinforce_pp_baseline import reinforce_pp_baseline
from molt.train.advantage.rloo import rloo
from molt.train.errors import ConfigError

__all__ = [
    "ESTIMATORS",
    "Advantages",
    "Estimator",
    "EstimatorSettings",
    "RolloutBatch",
    "TokenSignals",
    "compute_advantages",
    "find_estimator",
    "refuse_discount",
]

Estimator = Callable[[RolloutBatch, EstimatorSettings], Advantages]
"""A pure function from the rollouts of a window to the advantages of its action tokens."""

ESTIMATORS: dict[str, Estimator] = {
    "reinforce": reinforce,
    "reinforce_pp": reinforce_pp,
    "reinforce_pp_baseline": reinforce_pp_baseline,
    "group_mean": group_mean,
    "grpo": grpo,
    "rloo": rloo,
    "batch_mean": batch_mean,
    "gae": gae,
    "distillation": distillation,
}


@dataclass(frozen=True)
class TokenSignals:
    """What the ranks computed of each action token of a window, [N] each; None where it is not used."""

    penalties: np.ndarray | None = None
    """what the KL penalty takes from the token's reward, coefficient included"""
    values: np.ndarray | None = None
    """the critic's value before the token"""
    teacher_gap: np.ndarray | None = None
    """log-prob under the teacher minus log-prob under the old policy"""


@functools.cache
def find_estimator(name: str) -> Estimator:
    """The estimator of `algorithm.estimator`. A file is read once, so that a run keeps what it started with.

    Args:
        name: A key of `ESTIMATORS`, or the user's own function as `FILE.py:FUNCTION` or `module:FUNCTION`.

    Raises:
        ConfigError: There is no such estimator.
    """
    if name in ESTIMATORS:
        return ESTIMATORS[name]
    if ":" not in name:
        raise ConfigError(
            f"algorithm.estimator is {name!r}; it must be one of {', '.join(ESTIMATORS)}, or an estimator of your own "
            "as FILE.py:FUNCTION or module:FUNCTION"
        )
    return cast("Estimator", load_function(name))


def compute_advantages(
    name: str,
    rewards: np.ndarray,
    groups: np.ndarray,
    num_actions: np.ndarray,
    *,
    settings: EstimatorSettings,
    signals: TokenSignals | None = None,
) -> tuple[np.ndarray, np.ndarray | None]:
    """Advantages of a window by the estimator `name`, computed in float64.

    Args:
        name: As `find_estimator` takes it.
        rewards: [R] one a rollout.
        groups: [R] integers, equal where two rollouts answer the same prompt.
        num_actions: [R] action tokens of each rollout over all its segments.
        settings: The coefficients of estimators.
        signals: What is known of each action token, in the order of the result; None: nothing.

    Returns:
        Advantages, and returns for a critic, None without one: float32 [N] each, N the sum of `num_actions`, rollout by
        rollout.

    Raises:
        ConfigError: There is no such estimator; it has no use for `settings.gamma`; or one of the user's own does not
            return `Advantages` of shape [N].
    """
    signals = signals or TokenSignals()
    batch = RolloutBatch(
        rewards_R=torch.as_tensor(rewards, dtype=torch.float64),
        groups_R=torch.as_tensor(groups, dtype=torch.int64),
        num_actions_R=torch.as_tensor(num_actions, dtype=torch.int64),
        penalties_N=_float64(signals.penalties),
        values_N=_float64(signals.values),
        teacher_gap_N=_float64(signals.teacher_gap),
    )
    result: object = find_estimator(name)(batch, settings)
    num_tokens = int(batch.num_actions_R.sum())
    if not isinstance(result, Advantages) or result.advantages_N.shape != (num_tokens,):
        returned = result.advantages_N if isinstance(result, Advantages) else result
        shape = f"shape {list(returned.shape)}" if isinstance(returned, Tensor) else f"a {type(returned).__name__}"
        raise ConfigError(
            f"algorithm.estimator is {name!r}, which returned {shape}: "
            f"return Advantages of the window's {num_tokens} action tokens, as RolloutBatch.per_token makes them"
        )
    returns_N = result.returns_N
    return _float32(result.advantages_N), None if returns_N is None else _float32(returns_N)


def _float64(array: np.ndarray | None) -> Tensor | None:
    return None if array is None else torch.as_tensor(array, dtype=torch.float64)


def _float32(tensor_N: Tensor) -> np.ndarray:
    return tensor_N.to(torch.float32).numpy()
