"""The critic's loss. N action tokens."""

import torch
from torch import Tensor

from molt.train.loss.ratio import token_sum


def value_loss(
    values_N: Tensor, old_values_N: Tensor, returns_N: Tensor, *, clip: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """Half the larger of (v - return)^2 and (clip(v, v_old - clip, v_old + clip) - return)^2 of each token.

    PPO's clip for the critic, as its authors' program has it (arXiv:2006.05990 compares it): a value that has come more
    than `clip` nearer to its return than before the window has no gradient.

    Args:
        values_N: Values of the forward pass being differentiated, [N].
        old_values_N: Values before the window's first update, [N].
        returns_N: What the values are to predict, [N], never whitened.
        clip: How far a value may move; 0: no bound.

    Returns:
        [N], float32 or wider, for `weighted_sum` with the policy's weights; and sums over the tokens:
        `value_clip_fraction` (tokens whose gradient the clip took away), `value_mean`, `return_mean`,
        `return_squared_mean` and `value_error_squared_mean`. The last three give the explained variance:
        1 - value_error_squared_mean / (return_squared_mean - return_mean^2).
    """
    wide = torch.promote_types(values_N.dtype, torch.float32)
    values_N, old_values_N, returns_N = values_N.to(wide), old_values_N.to(wide), returns_N.to(wide)
    squared_N = (values_N - returns_N).square()
    worst_N = squared_N
    if clip > 0:
        clipped_N = torch.clamp(values_N, old_values_N - clip, old_values_N + clip)
        worst_N = torch.maximum(squared_N, (clipped_N - returns_N).square())
    return 0.5 * worst_N, {
        "value_clip_fraction": token_sum(worst_N > squared_N),
        "value_mean": token_sum(values_N),
        "return_mean": token_sum(returns_N),
        "return_squared_mean": token_sum(returns_N.square()),
        "value_error_squared_mean": token_sum(squared_N),
    }
