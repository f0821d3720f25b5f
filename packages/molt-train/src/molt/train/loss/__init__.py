"""Stage 8, loss: per-token surrogates, the correction that weighs them, and the one denominator that reduces them.

Everything is a pure function on the flat axis of a microbatch's action tokens, [N].
"""

from torch import Tensor

from molt.train.config import AlgorithmConfig
from molt.train.loss.correction import importance_weights
from molt.train.loss.logprob import gather_logprobs
from molt.train.loss.policy import ppo_clip
from molt.train.loss.reduce import window_token_mean

__all__ = ["gather_logprobs", "policy_loss", "window_token_mean"]


def policy_loss(
    current_N: Tensor,
    old_N: Tensor,
    behaviour_N: Tensor,
    advantages_N: Tensor,
    *,
    settings: AlgorithmConfig,
    mask_N: Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The corrected policy loss of each action token: importance weight times PPO's clipped surrogate.

    Args:
        current_N: Log-probs of the forward pass being differentiated.
        old_N: Log-probs of the actor before this window's first update; `current_N.detach()` where that is the same
            pass, which makes the PPO ratio exactly 1.
        behaviour_N: Log-probs recorded when the tokens were sampled.
        advantages_N: Advantage of each token.
        settings: Bounds of the clip and of the correction.
        mask_N: False at slots that are no actions, whatever they hold. None: every slot is one.

    Returns:
        The loss of each token, [N], for `window_token_mean`; and sums over the action tokens, which become the means
        they are named for when added up over the window and divided by its number of action tokens.
    """
    surrogate_N, clip_sums = ppo_clip(
        current_N,
        old_N.detach(),
        advantages_N,
        clip_low=settings.clip_low,
        clip_high=settings.clip_high,
        mask_N=mask_N,
    )
    weights_N, weight_sums = importance_weights(
        old_N,
        behaviour_N,
        scheme=settings.correction,
        low=settings.correction_low,
        high=settings.correction_high,
        mask_N=mask_N,
    )
    return weights_N * surrogate_N, clip_sums | weight_sums
