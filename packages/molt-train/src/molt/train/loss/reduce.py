"""From token losses to the scalar that a rank backpropagates. N action tokens of a microbatch."""

from torch import Tensor


def weighted_sum(loss_N: Tensor, weights_N: Tensor, *, dp_size: int) -> Tensor:
    """A microbatch's share of the loss of the whole optimizer step: sum(weight * loss) * dp_size.

    Every aggregation is such a sum, its denominators in the weights (`Row.weight`). They were counted over the whole
    step before anything was rejected, so the summed gradient does not depend on how rows were split into microbatches
    and ranks, and tokens that a correction gives weight 0 still count in them.

    Args:
        loss_N: Loss of each token, correction included.
        weights_N: What each token counts, constants.
        dp_size: Ranks that split the step's rows; undoes the mean that data parallelism takes over their gradients.

    Returns:
        A scalar; without tokens, a zero that still has a gradient, for every rank runs the same backward pass.
    """
    return (loss_N * weights_N).sum() * dp_size
