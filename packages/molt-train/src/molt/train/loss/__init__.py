"""Stage 8, loss: one short file a surrogate, the correction that weighs it, the sum that reduces it.

Everything is a pure function on the flat axis of a microbatch's action tokens, [N].
"""

from molt.train.loss.adaptive_kl import AdaptiveKl
from molt.train.loss.correction import correction_weights, rollout_sums
from molt.train.loss.inputs import LossInputs
from molt.train.loss.kl import reward_penalty
from molt.train.loss.policy import SURROGATES, Surrogate, policy_loss
from molt.train.loss.reduce import weighted_sum
from molt.train.loss.value import value_loss

__all__ = [
    "SURROGATES",
    "AdaptiveKl",
    "LossInputs",
    "Surrogate",
    "correction_weights",
    "policy_loss",
    "reward_penalty",
    "rollout_sums",
    "value_loss",
    "weighted_sum",
]
