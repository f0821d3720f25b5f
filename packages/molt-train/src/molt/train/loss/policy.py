"""The policy loss: correction times surrogate, less entropy, plus divergence. N action tokens."""

from collections.abc import Callable

import torch
from torch import Tensor

from molt.train.config import AlgorithmConfig
from molt.train.loss.cispo import cispo
from molt.train.loss.gspo import gspo
from molt.train.loss.inputs import LossInputs
from molt.train.loss.kl import k1, k2, k3
from molt.train.loss.policy_gradient import policy_gradient
from molt.train.loss.ppo import ppo
from molt.train.loss.ratio import probability_ratio, token_sum

Surrogate = Callable[[LossInputs, AlgorithmConfig], tuple[Tensor, dict[str, Tensor]]]
"""(inputs, settings) -> (loss of each token [N] before correction and aggregation, sums over the tokens)."""

SURROGATES: dict[str, Surrogate] = {"ppo": ppo, "gspo": gspo, "cispo": cispo, "policy_gradient": policy_gradient}
"""By the names of `algorithm.loss`."""


def policy_loss(inputs: LossInputs, *, settings: AlgorithmConfig, kl_coef: float) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss of each action token: correction * surrogate - entropy_coef * entropy + kl_coef * divergence.

    The divergence is k2 of the current policy from the reference, weighted by the correction and by the ratio of the
    current to the old policy; see `molt.train.loss.kl` for why. With `kl_placement` `reward` it is no part of the loss.

    Args:
        inputs: The tokens.
        settings: Which surrogate, its bounds, `entropy_coef`, `kl_placement`.
        kl_coef: What the divergence counts, at least 0; `settings.kl_coef`, or what it has adapted to.

    Returns:
        The loss of each token, [N], for `weighted_sum`; and scalar sums over the tokens, which become the means they
        are named for when added up over the window and divided by its number of action tokens: `ratio_mean` (current
        over old), those of the surrogate, `entropy_mean` where there are entropies, and `kl_mean` (k1) and
        `kl_k3_mean` where there is a reference.

    Raises:
        ValueError: `entropy_coef` without entropies, or a divergence in the loss without a reference.
    """
    surrogate_N, sums = SURROGATES[settings.loss](inputs, settings)
    loss_N = inputs.correction_N * surrogate_N
    ratio_N = probability_ratio(inputs.current_N.detach(), inputs.old_N)
    sums = sums | {"ratio_mean": token_sum(ratio_N)} | _divergence_sums(inputs)
    if inputs.entropy_N is not None:
        sums["entropy_mean"] = token_sum(inputs.entropy_N)
    if settings.entropy_coef != 0:
        loss_N = loss_N - settings.entropy_coef * _given(inputs.entropy_N, "entropy_coef", "entropy_N")
    if settings.kl_placement == "loss" and kl_coef != 0:
        reference_N = _given(inputs.reference_N, "kl_coef", "reference_N")
        loss_N = loss_N + kl_coef * (inputs.correction_N * ratio_N) * k2(inputs.current_N, reference_N)
    return loss_N, sums


def _divergence_sums(inputs: LossInputs) -> dict[str, Tensor]:
    if inputs.reference_N is None:
        return {}
    with torch.no_grad():
        return {
            "kl_mean": token_sum(k1(inputs.current_N, inputs.reference_N)),
            "kl_k3_mean": token_sum(k3(inputs.current_N, inputs.reference_N)),
        }


def _given(values_N: Tensor | None, key: str, field: str) -> Tensor:
    if values_N is None:
        raise ValueError(f"algorithm.{key} is not 0, but the loss was given no {field}")
    return values_N
