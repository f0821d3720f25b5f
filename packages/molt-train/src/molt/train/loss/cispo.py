"""CISPO: the ratio only weighs, so that no token loses its gradient. N action tokens."""

from torch import Tensor

from molt.train.config import AlgorithmConfig
from molt.train.loss.inputs import LossInputs
from molt.train.loss.ratio import probability_ratio, token_sum


def cispo(inputs: LossInputs, settings: AlgorithmConfig) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss -min(r, 1 + clip_high) A current of each token, r = exp(current - old) held constant.

    arXiv:2506.13585. Nothing is clipped below, and `clip_low` has no effect.

    Programs disagree about the number: here, as in verl, the ceiling of the ratio is 1 + clip_high, so a ceiling of 5
    is clip_high 4. TRL and Liger take the ceiling itself: their 5 copied here would be a ceiling of 6.

    Returns:
        [N], and the sum `clip_fraction` (tokens whose ratio is above the ceiling; they still have a gradient).
    """
    ceiling = 1.0 + settings.clip_high
    ratio_N = probability_ratio(inputs.current_N.detach(), inputs.old_N)
    loss_N = -ratio_N.clamp(max=ceiling) * inputs.advantages_N * inputs.current_N
    return loss_N, {"clip_fraction": token_sum(ratio_N > ceiling)}
