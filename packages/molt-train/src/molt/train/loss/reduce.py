"""Aggregation: from token losses to the scalar that a rank backpropagates. N action tokens of a microbatch."""

import torch
from torch import Tensor


def window_token_mean(loss_N: Tensor, *, num_action_tokens: int, dp_size: int, mask_N: Tensor | None = None) -> Tensor:
    """A microbatch's share of the token mean over the whole optimizer window.

    The denominator is fixed for the window, so the summed gradient does not depend on how its rows were split into
    microbatches and ranks. Tokens whose weight a correction set to 0 count in it.

    Args:
        loss_N: Loss of each token, weights included.
        num_action_tokens: Action tokens of the window, over all microbatches and ranks.
        dp_size: Ranks that split the window's rows; undoes the mean that data parallelism takes over their gradients.
        mask_N: False at slots that are no actions. None: every slot is one.

    Returns:
        sum(loss) / num_action_tokens * dp_size; a zero that still has a gradient when the window has no action token.
    """
    if mask_N is not None:
        loss_N = torch.where(mask_N, loss_N, 0.0)
    if num_action_tokens == 0:
        return loss_N.sum() * 0.0
    return loss_N.sum() * (dp_size / num_action_tokens)
