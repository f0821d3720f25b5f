"""One update of the policy: what the weights before it say of the window, then an optimizer step for each share."""

# Shapes: N action tokens of a microbatch, R rollouts of the window, S sums of each.

from collections.abc import Sequence

import torch

from molt.train.actor.batch import Batch
from molt.train.actor.head import action_logprobs
from molt.train.actor.step import Share, Totals, Trainer, optimise
from molt.train.config import AlgorithmConfig, correction_rule
from molt.train.loss import LossInputs, correction_weights, policy_loss, rollout_sums
from molt.train.records.window import StepReport


def update_policy(
    trainer: Trainer, shares: Sequence[Share], *, step: int, algorithm: AlgorithmConfig, kl_coef: float
) -> StepReport:
    """Make the optimizer steps of one window. All ranks call this alike.

    The old log-probs are those of the weights before the first of the steps. They take a pass of their own where there
    are several steps, or where a correction looks at whole rollouts, whose segments may lie on other ranks; with
    neither, the one forward pass gives them.

    Raises:
        ActorError: See `optimise`.
    """
    rule = correction_rule(algorithm)
    shares = [share for share in shares if share.num_action_tokens]
    olds = [old_logprobs(trainer, share) for share in shares] if len(shares) > 1 or rule.needs_rollout else None
    sums_RS = _rollout_sums(shares, olds) if olds is not None and rule.needs_rollout else None
    with_entropy = algorithm.entropy_coef != 0

    def loss_of(batch: Batch, share: int, position: int) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        current_N, entropy_N = action_logprobs(
            trainer.policy,
            batch,
            temperature=trainer.temperature,
            chunk_size=trainer.logprob_chunk,
            with_entropy=with_entropy,
        )
        old_N = olds[share][position] if olds is not None else current_N.detach()
        weights_N, correction_sums = correction_weights(old_N, batch.behaviour_N, batch.rollout_N, rule, sums_RS)
        inputs = LossInputs(
            current_N=current_N,
            old_N=old_N,
            advantages_N=batch.advantages_N,
            correction_N=weights_N,
            sequence_N=batch.sequence_N,
            num_sequences=batch.num_sequences,
            entropy_N=entropy_N,
            # By the setting, not by what is there: a rank whose rows are all elsewhere reports the same sums.
            reference_N=batch.reference_N if algorithm.kl_coef else None,
        )
        loss_N, sums = policy_loss(inputs, settings=algorithm, kl_coef=kl_coef)
        return loss_N, correction_sums | sums | gap_sums(old_N, batch)

    totals = optimise(trainer, shares, step=step, loss_of=loss_of)
    return report(totals, step=step, num_action_tokens=sum(share.num_action_tokens for share in shares))


def old_logprobs(trainer: Trainer, share: Share) -> list[torch.Tensor]:
    """Log-probs of a share's action tokens under the weights as they are, [N] a microbatch."""
    with torch.no_grad():
        return [
            action_logprobs(
                trainer.policy,
                batch,
                temperature=trainer.temperature,
                chunk_size=trainer.logprob_chunk,
                with_entropy=False,
            )[0]
            for batch in share.batches
        ]


def report(totals: Totals, *, step: int, num_action_tokens: int) -> StepReport:
    """Means over the window's action tokens; loss and gradient norm are means over its optimizer steps."""
    means = totals.means(num_action_tokens)
    mean, square = means.get("correction_weight_mean", 1.0), means.pop("weight_squared_mean", 1.0)
    return StepReport(
        step=step,
        loss=_mean(totals.losses),
        grad_norm=_mean(totals.grad_norms),
        lr=totals.lr,
        logprob_gap_mean=means.pop("logprob_gap", 0.0),
        logprob_gap_max=means.pop("logprob_gap_max", 0.0),
        metrics=means | {"effective_sample_size": mean * mean / square if square else 0.0},
    )


def _rollout_sums(shares: Sequence[Share], olds: Sequence[Sequence[torch.Tensor]]) -> torch.Tensor | None:
    total_RS = None
    for share, old in zip(shares, olds, strict=True):
        for batch, old_N in zip(share.batches, old, strict=True):
            sums_RS = rollout_sums(old_N, batch.behaviour_N, batch.rollout_N, share.num_rollouts)
            total_RS = sums_RS if total_RS is None else total_RS + sums_RS
    if total_RS is not None:  # every rank has equally many microbatches
        torch.distributed.all_reduce(total_RS)
    return total_RS


def gap_sums(old_N: torch.Tensor, batch: Batch) -> dict[str, torch.Tensor]:
    """Sums over a microbatch's tokens of |recorded - recomputed|, its maximum, and the sum of the log-probs."""
    gap_N = (old_N.detach() - batch.behaviour_N).abs()
    largest = gap_N.max() if gap_N.numel() else gap_N.new_zeros(())
    return {"logprob_gap": gap_N.sum(), "logprob_gap_max": largest, "logprob_mean": old_N.detach().sum()}


def _mean(values: Sequence[float]) -> float:
    return sum(values) / max(1, len(values))
