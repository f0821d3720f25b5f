"""What a policy loss reads: the action tokens of one microbatch on one flat axis. N action tokens."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class LossInputs:
    """One value a token, [N]; log-probs are those of the sampled tokens. Only `current_N`, `entropy_N` have gradients.

    Every slot is an action token: prompts, tool results and padding were left out when the microbatch was made.
    """

    current_N: Tensor
    """Log-probs of the forward pass being differentiated."""
    old_N: Tensor
    """Log-probs before this window's first update. `current_N.detach()` makes every ratio of the two exactly 1."""
    advantages_N: Tensor
    correction_N: Tensor
    """Importance weights, see `correction_weights`: constants."""
    sequence_N: Tensor
    """int64: the row of each token in the microbatch, a segment of a rollout, below `num_sequences`."""
    num_sequences: int
    entropy_N: Tensor | None = None
    """Entropy in nats of the current policy at each token."""
    reference_N: Tensor | None = None
    """Log-probs under the reference policy."""
