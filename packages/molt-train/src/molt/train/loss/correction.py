"""Importance correction: how much a token counts that another policy sampled.

rho = exp(old - behaviour) covers both the staleness of a rollout and the mismatch of the serving engine. A rule has two
parts: a weight made of rho (level and mode), and a gate that closes on whole rollouts, all their segments together.
The weight of an admitted rollout's tokens is what level and mode make it. Weights multiply the loss and have no
gradient; a token of weight 0 stays in every denominator.
"""

# Shapes: N action tokens of a microbatch, R rollouts of the window, S the four sums of a rollout.

import torch
from torch import Tensor

from molt.train.config import CorrectionRule
from molt.train.loss.kl import k3
from molt.train.loss.ratio import MAX_LOG_RATIO, log_ratio, probability_ratio, token_sum

_SMALLEST_PROBABILITY = 1e-6


def rollout_sums(old_N: Tensor, behaviour_N: Tensor, rollout_N: Tensor, num_rollouts: int) -> Tensor:
    """What a rule needs to know of whole rollouts, from the tokens of one microbatch.

    Add up the results of a window's microbatches, and of its ranks, before weighing anything: the segments of one
    rollout may lie anywhere.

    Args:
        old_N: Log-probs before this window's first update.
        behaviour_N: Log-probs recorded when the tokens were sampled.
        rollout_N: int64, the rollout of each token in the window.
        num_rollouts: Rollouts of the window.

    Returns:
        float64 [R, 4]: for each rollout its number of tokens, and the sums of log rho, of k3 = rho - 1 - log rho and of
        the Bernoulli divergence of its tokens. log rho is clamped to +-20 a token.
    """
    old_N, behaviour_N = old_N.detach().double(), behaviour_N.detach().double()
    sums_NS = torch.stack(
        [
            torch.ones_like(old_N),
            log_ratio(old_N, behaviour_N),
            k3(behaviour_N, old_N),
            bernoulli_kl(behaviour_N, old_N),
        ],
        dim=-1,
    )
    return sums_NS.new_zeros(num_rollouts, 4).index_add(0, rollout_N, sums_NS)


def bernoulli_kl(behaviour_N: Tensor, old_N: Tensor) -> Tensor:
    """Divergence of "this token or another" between two policies: p log(p/q) + (1-p) log((1-p)/(1-q)), in nats.

    FlashREINFORCE's proxy for the divergence of whole distributions, of which one token's probabilities are known.

    Args:
        behaviour_N: log p, the policy that sampled.
        old_N: log q.

    Returns:
        [N], at least 0. Probabilities are clamped to [1e-6, 1 - 1e-6].
    """
    p_N, q_N = (
        logprobs_N.exp().clamp(_SMALLEST_PROBABILITY, 1.0 - _SMALLEST_PROBABILITY)
        for logprobs_N in (behaviour_N, old_N)
    )
    return p_N * (p_N / q_N).log() + (1.0 - p_N) * ((1.0 - p_N) / (1.0 - q_N)).log()


def correction_weights(
    old_N: Tensor, behaviour_N: Tensor, rollout_N: Tensor, rule: CorrectionRule, sums_RS: Tensor | None
) -> tuple[Tensor, dict[str, Tensor]]:
    """The weight of each action token.

    Level: the ratio is rho of the token (`token`), the product of rho over the rollout (`sequence`, unbiased but of a
    variance that grows with its length; the sum of logs is clamped to +-20), or its geometric mean over the rollout
    (`geometric`). Mode: the weight is 1 (`none`), min(ratio, high) (`truncate`, truncated importance sampling; with
    high infinite the plain ratio), the ratio inside [low, high] (`clip`), or the ratio where it lies in [low, high] and
    else 0 (`mask`, as IcePop, arXiv:2510.18855; of sequences, arXiv:2512.23075). Gate: all weights of a rollout are 0
    unless the geometric mean of its rho lies in [gate_low, gate_high] (`geometric`), or its mean k3 (`k3`) or Bernoulli
    divergence (`binary_kl`, FlashREINFORCE) is at most gate_high. All bounds belong to what they admit.

    Log ratios of either sign cancel in the geometric mean: a rollout may pass it with every token far off. k3 and the
    Bernoulli divergence see that.

    Args:
        old_N: Log-probs before this window's first update.
        behaviour_N: Log-probs recorded when the tokens were sampled.
        rollout_N: int64, the rollout of each token in the window.
        rule: Level, mode, gate and bounds.
        sums_RS: `rollout_sums` of the whole window, over all ranks. None where `rule.needs_rollout` is false.

    Returns:
        Weights [N], float32 or wider, and sums over the tokens: `rho_mean`, `log_rho_mean` and `k3_mean` (of the
        tokens' own rho, whatever the level), `correction_weight_mean`, `weight_squared_mean` (the effective share of
        the tokens is correction_weight_mean^2 / weight_squared_mean), `correction_filtered` (tokens whose ratio was
        outside the bounds) and `gate_filtered` (tokens of rollouts that the gate turned away).

    Raises:
        ValueError: The rule needs whole rollouts, and `sums_RS` is None.
    """
    old_N, behaviour_N = old_N.detach(), behaviour_N.detach()
    rho_N = probability_ratio(old_N, behaviour_N)
    weights_N, is_outside_N = _weigh(_ratio(rho_N, rollout_N, rule, sums_RS), rule)
    gate_N = _gate(rollout_N, rule, sums_RS).to(rho_N.dtype) if rule.gate != "none" else torch.ones_like(rho_N)
    weights_N = weights_N * gate_N
    return weights_N, {
        "rho_mean": token_sum(rho_N),
        "log_rho_mean": token_sum(log_ratio(old_N, behaviour_N)),
        "k3_mean": token_sum(k3(behaviour_N, old_N)),
        "correction_weight_mean": token_sum(weights_N),
        "weight_squared_mean": token_sum(weights_N.square()),
        "correction_filtered": token_sum(is_outside_N),
        "gate_filtered": token_sum(gate_N == 0),
    }


def _ratio(rho_N: Tensor, rollout_N: Tensor, rule: CorrectionRule, sums_RS: Tensor | None) -> Tensor:
    """The ratio that the mode bounds, [N]."""
    if rule.mode == "none" or rule.level == "token":
        return rho_N
    tokens_R, log_rho_R, _, _ = _columns(sums_RS, rule)
    if rule.level == "geometric":
        log_rho_R = log_rho_R / tokens_R
    return log_rho_R.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp().to(rho_N.dtype)[rollout_N]


def _weigh(ratio_N: Tensor, rule: CorrectionRule) -> tuple[Tensor, Tensor]:
    """Weights by the mode, and which ratios are outside its bounds. A NaN stays one: the step must not hide it."""
    is_above_N, is_below_N = ratio_N > rule.high, ratio_N < rule.low
    match rule.mode:
        case "none":
            return torch.ones_like(ratio_N), torch.zeros_like(is_above_N)
        case "truncate":
            return ratio_N.clamp(max=rule.high), is_above_N
        case "clip":
            return ratio_N.clamp(rule.low, rule.high), is_above_N | is_below_N
        case "mask":
            return torch.where(is_above_N | is_below_N, 0.0, ratio_N), is_above_N | is_below_N


def _gate(rollout_N: Tensor, rule: CorrectionRule, sums_RS: Tensor | None) -> Tensor:
    """1 for tokens of admitted rollouts, 0 for those of others, NaN where that cannot be said. float64 [N]."""
    tokens_R, log_rho_R, k3_R, binary_kl_R = _columns(sums_RS, rule)
    low = 0.0
    match rule.gate:
        case "geometric":
            distance_R, low = (log_rho_R / tokens_R).exp(), rule.gate_low
        case "k3":
            distance_R = k3_R / tokens_R
        case _:
            distance_R = binary_kl_R / tokens_R
    is_outside_R = (distance_R > rule.gate_high) | (distance_R < low)
    return torch.where(distance_R.isnan(), torch.nan, torch.where(is_outside_R, 0.0, 1.0).double())[rollout_N]


def _columns(sums_RS: Tensor | None, rule: CorrectionRule) -> tuple[Tensor, ...]:
    if sums_RS is None:
        raise ValueError(f"the correction weighs whole rollouts, but was given no sums of them: {rule!r}")
    return sums_RS.unbind(-1)
