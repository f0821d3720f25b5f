"""Aggregation: what each action token counts in the loss of one optimizer step. R rollouts of the step.

Every aggregation is a sum over tokens with a constant weight each: loss = sum_t weight_t * loss_t. The weights come
from the counts of the whole step, before it is cut into ranks and microbatches and before any correction rejects a
token, so no denominator depends on either.
"""

from collections.abc import Sequence
from typing import Literal

import numpy as np

from molt.train.errors import ConfigError

Aggregation = Literal["token_mean", "sequence_mean", "constant", "prompt_mean"]


def rollout_weights(
    num_actions: Sequence[int], prompts: Sequence[int], *, aggregation: Aggregation, length: int = 0
) -> np.ndarray:
    """The weight of each action token of a rollout.

    `token_mean` (DAPO, arXiv:2503.14476): 1 / N, N action tokens of the step. `sequence_mean` (GRPO, arXiv:2402.03300):
    1 / (R T_i), T_i action tokens of the rollout. `constant` (Dr. GRPO, arXiv:2503.20783): 1 / (R length).
    `prompt_mean`: 1 / (P N_p), P prompts, N_p action tokens of the prompt's rollouts. A rollout or prompt without
    action tokens counts in R and P, and weighs 0.

    Args:
        num_actions: [R] action tokens of each rollout over all its segments.
        prompts: [R] numbers, equal where two rollouts answer the same prompt.
        aggregation: One of the four.
        length: Tokens that `constant` divides a rollout's sum by.

    Returns:
        float64 [R].

    Raises:
        ConfigError: `constant` without a length.
    """
    actions_R = np.asarray(num_actions, dtype=np.int64)
    num_rollouts = len(actions_R)
    match aggregation:
        case "token_mean":
            counts_R = np.full(num_rollouts, actions_R.sum())
        case "sequence_mean":
            counts_R = num_rollouts * actions_R
        case "constant":
            if length < 1:
                raise ConfigError(
                    f"algorithm.aggregation_length is {length}, but 'constant' divides by it; set it to the most "
                    "tokens that a rollout may sample"
                )
            counts_R = np.where(actions_R > 0, num_rollouts * length, 0)
        case "prompt_mean":
            _, prompt_R = np.unique(np.asarray(prompts, dtype=np.int64), return_inverse=True)
            actions_P = np.bincount(prompt_R, weights=actions_R)
            counts_R = len(actions_P) * actions_P[prompt_R]
    return np.divide(1.0, counts_R, out=np.zeros(num_rollouts), where=counts_R > 0)
