"""GSPO: one clipped ratio for each sequence. N action tokens, S sequences."""

import torch
from torch import Tensor

from molt.train.config import AlgorithmConfig
from molt.train.loss.inputs import LossInputs
from molt.train.loss.ppo import clip_ratio
from molt.train.loss.ratio import log_ratio, token_sum


def gspo(inputs: LossInputs, settings: AlgorithmConfig) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss -min(s A, clip(s, 1 - clip_low, 1 + clip_high) A) of each token, s the ratio of its whole sequence.

    arXiv:2507.18071, in its token form: s = exp(mean of current - old over the sequence) is a constant, and each token
    adds its own gradient by the factor exp(current - its own value), which is 1. A sequence is a row of the microbatch:
    a rollout of several segments has a ratio for each. The band is far narrower than PPO's, since the mean varies less:
    the paper has clip_low 3e-4 and clip_high 4e-4. Its average over sequences is the aggregation `sequence_mean`.

    Returns:
        [N], and the sum `clip_fraction` (tokens of clipped sequences).
    """
    ratio_N = _sequence_ratio(inputs) * (inputs.current_N - inputs.current_N.detach()).exp()
    plain_N, clipped_N = ratio_N * inputs.advantages_N, clip_ratio(ratio_N, settings) * inputs.advantages_N
    return -torch.minimum(plain_N, clipped_N), {"clip_fraction": token_sum(clipped_N < plain_N)}


def _sequence_ratio(inputs: LossInputs) -> Tensor:
    """exp(mean log ratio) of the sequence of each token, [N], without a gradient."""
    log_ratio_N = log_ratio(inputs.current_N.detach(), inputs.old_N)
    # Added up in float64, so that the order of a GPU's additions does not show in float32.
    sums_S = log_ratio_N.new_zeros(inputs.num_sequences, dtype=torch.float64)
    sums_S = sums_S.index_add(0, inputs.sequence_N, log_ratio_N.double())
    tokens_S = torch.bincount(inputs.sequence_N, minlength=inputs.num_sequences)
    return (sums_S / tokens_S).exp()[inputs.sequence_N].to(log_ratio_N.dtype)
