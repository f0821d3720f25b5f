"""The coefficient of the divergence: fixed, or steered towards a target."""

import math

import msgspec

_LARGEST_ERROR = 0.2


class AdaptiveKl(msgspec.Struct, frozen=True, kw_only=True):
    """The coefficient after some window (arXiv:1909.08593): all there is to save, and to go on from."""

    coef: float
    target: float = 0.0
    """Mean divergence that is aimed for, nats an action token. 0: the coefficient is fixed."""
    horizon: int = 10_000
    """Rollouts over which the coefficient adapts."""

    def after(self, kl: float, *, num_rollouts: int) -> "AdaptiveKl":
        """The coefficient after a window: coef * (1 + clip(kl / target - 1, -.2, .2) * num_rollouts / horizon).

        A window of more rollouts than the horizon counts as the horizon: it moves the coefficient by a fifth at most.

        Args:
            kl: Mean divergence of the window, nats an action token: `kl_mean`.
            num_rollouts: Rollouts of the window.

        Raises:
            ValueError: `kl` is not finite.
        """
        if self.target == 0:
            return self
        if not math.isfinite(kl):
            raise ValueError(f"the divergence is {kl}: no coefficient follows from it")
        error = max(-_LARGEST_ERROR, min(_LARGEST_ERROR, kl / self.target - 1.0))
        factor = 1.0 + error * min(1.0, num_rollouts / self.horizon)
        return msgspec.structs.replace(self, coef=self.coef * factor)
