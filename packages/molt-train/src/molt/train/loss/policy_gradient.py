"""Plain policy gradient (Williams 1992). N action tokens."""

from torch import Tensor

from molt.train.config import AlgorithmConfig
from molt.train.loss.inputs import LossInputs


def policy_gradient(inputs: LossInputs, settings: AlgorithmConfig) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss -A current of each token.

    No ratio of the current to the old policy enters: right for the first optimizer step of a window, which is why
    FlashREINFORCE makes a single one. What sampled the tokens is the correction's business.

    Returns:
        [N], and no sums.
    """
    del settings  # nothing to set
    return -inputs.advantages_N * inputs.current_N, {}
