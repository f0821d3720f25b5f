"""The critic: values before a window, and their regression on the returns of it."""

# Shapes: N action tokens of a microbatch.

from collections.abc import Sequence

import torch

from molt.train.actor.batch import Batch
from molt.train.actor.step import Share, Trainer, optimise
from molt.train.actor.value_model import action_values
from molt.train.loss import value_loss

NO_VARIANCE = 1e-6
"""Returns that vary by less than this part of their mean square are all alike; rounding alone makes as much."""


class Critic:
    """The value model of `gae` and what trains it."""

    def __init__(self, trainer: Trainer, *, value_clip: float):
        self.trainer, self._value_clip = trainer, value_clip

    def values(self, batch: Batch) -> torch.Tensor:
        """V of the state before each action token under the weights as they are, float32 [N]."""
        with torch.no_grad():
            return action_values(self.trainer.policy, batch)

    def update(self, shares: Sequence[Share], *, step: int) -> dict[str, float]:
        """Make an optimizer step for each of `shares`, which together are one window. All ranks call this alike.

        Token losses are weighed as the policy's are, so both have one denominator.

        Returns:
            Means over the window's action tokens: `value_mean`, `return_mean`, `value_clip_fraction` and others; means
            over its optimizer steps: `value_loss`, `critic_grad_norm`; the last step's `critic_lr`; and
            `explained_variance`, 1 - E[(V - return)^2] / Var[return], which is 0 where returns do not vary.

        Raises:
            ActorError: See `optimise`.
            ValueError: A row has no returns, or no values from before the window.
        """
        totals = optimise(self.trainer, shares, step=step, loss_of=self._loss)
        means = totals.means(sum(share.num_action_tokens for share in shares))
        num_steps = max(1, len(totals.losses))
        return means | {
            "value_loss": sum(totals.losses) / num_steps,
            "critic_grad_norm": sum(totals.grad_norms) / num_steps,
            "critic_lr": totals.lr,
            "explained_variance": _explained_variance(means),
        }

    def _loss(self, batch: Batch, share: int, position: int) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        del share, position
        if batch.values_N is None or batch.returns_N is None:
            raise ValueError("a row for the critic has no returns, or no values from before the window")
        values_N = action_values(self.trainer.policy, batch)
        return value_loss(values_N, batch.values_N, batch.returns_N, clip=self._value_clip)


def _explained_variance(means: dict[str, float]) -> float:
    square = means.get("return_squared_mean", 0.0)
    variance = square - means.get("return_mean", 0.0) ** 2
    if variance <= NO_VARIANCE * square:
        return 0.0
    return 1.0 - means["value_error_squared_mean"] / variance
