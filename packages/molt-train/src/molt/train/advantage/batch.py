"""What an estimator is given and what it returns: any function from the first to the last of these is an estimator.

Shapes: R rollouts of the window, N action tokens of the window (rollout by rollout, in order). Segments do not appear:
a rollout counts once in every mean, however many rows it was cut into. Neither do prompts, tool texts and templates:
two action tokens with a tool's answer between them stand side by side here.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from molt.train.errors import ConfigError


@dataclass(frozen=True)
class EstimatorSettings:
    """The coefficients of `[algorithm]` that estimators read."""

    gamma: float = 1.0
    """discount an action token"""
    lam: float = 1.0
    """weight of longer returns, an action token (`gae`)"""
    distillation_coef: float = 1.0
    """scale of the advantage (`distillation`)"""


@dataclass(frozen=True)
class Advantages:
    """What an estimator returns."""

    advantages_N: Tensor
    """float64 [N]"""
    returns_N: Tensor | None = None
    """float64 [N]: what a critic is to predict; None without one"""


@dataclass(frozen=True)
class RolloutBatch:
    """The rollouts of one window."""

    rewards_R: Tensor
    """float64 [R]"""
    groups_R: Tensor
    """int64 [R]: equal where two rollouts answer the same prompt"""
    num_actions_R: Tensor
    """int64 [R]: action tokens of the rollout over all its segments; may be 0"""
    penalties_N: Tensor | None = None
    """float64 [N]: what the KL penalty takes from the reward of the token, coefficient included"""
    values_N: Tensor | None = None
    """float64 [N]: the critic's value before the token is sampled"""
    teacher_gap_N: Tensor | None = None
    """float64 [N]: log-prob of the token under the teacher minus that under the old policy"""

    def __post_init__(self) -> None:
        lengths = dict.fromkeys(("groups_R", "num_actions_R"), len(self.rewards_R))
        lengths |= dict.fromkeys(("penalties_N", "values_N", "teacher_gap_N"), int(self.num_actions_R.sum()))
        for name, length in lengths.items():
            given = getattr(self, name)
            if given is not None and given.shape != (length,):
                raise ValueError(f"{name} has shape {list(given.shape)}; the window makes it [{length}]")

    def per_token(self, values_R: Tensor) -> Tensor:
        """Each rollout's value at each of its action tokens, [R] -> [N]."""
        return torch.repeat_interleave(values_R, self.num_actions_R)

    def tokens_left(self) -> Tensor:
        """How many action tokens of its rollout come after each, int64 [N]: 0 at the last one."""
        ends_N = self.per_token(self.num_actions_R.cumsum(0))
        return ends_N - 1 - torch.arange(len(ends_N))

    def token_rewards(self) -> Tensor:
        """The rollout's reward on its last action token, less the penalty of every token, float64 [N]."""
        rewards_N = torch.where(self.tokens_left() == 0, self.per_token(self.rewards_R), 0.0)
        return rewards_N if self.penalties_N is None else rewards_N - self.penalties_N

    def outcomes(self) -> Tensor:
        """Each rollout's reward less the penalties of all its action tokens, float64 [R].

        For estimators that give all tokens of a rollout one advantage. Log-ratios of tokens add up to that of the
        sequence, so the outcome is what a penalty on the sequence's divergence makes of the reward, and its gradient is
        the whole of it: a token's own penalty alone would leave out what the token does to all later ones.
        """
        if self.penalties_N is None:
            return self.rewards_R
        rollout_N = self.per_token(torch.arange(len(self.rewards_R)))
        return self.rewards_R - torch.zeros_like(self.rewards_R).index_add(0, rollout_N, self.penalties_N)

    def discounted_sums(self, values_N: Tensor, factor: float) -> Tensor:
        """The sum over u >= t of factor^(u - t) * values_u, over the action tokens of t's rollout, float64 [N].

        By doubling: the sum over 2k tokens is that over k, plus factor^k times that over the k after them.
        """
        tokens_left_N = self.tokens_left()
        longest = int(tokens_left_N.max()) if len(tokens_left_N) else 0
        sums_N, span = values_N, 1
        while span <= longest:
            after_N = torch.where(tokens_left_N >= span, sums_N.roll(-span), 0.0)
            sums_N, span = sums_N + factor**span * after_N, 2 * span
        return sums_N


def refuse_discount(settings: EstimatorSettings, estimator: str) -> None:
    """Raises ConfigError for a discount that an estimator without token rewards would ignore."""
    if settings.gamma != 1.0:
        raise ConfigError(
            f"algorithm.gamma is {settings.gamma}, but {estimator!r} discounts nothing; "
            "set it to 1.0, or algorithm.estimator to 'reinforce', 'reinforce_pp' or 'gae'"
        )
