"""An update in which only the critic learns: the policy is looked at and stays as it is."""

from collections.abc import Sequence

from molt.train.actor.policy_update import gap_sums, old_logprobs, report
from molt.train.actor.step import Share, Totals, Trainer
from molt.train.records.window import StepReport


def observe_policy(trainer: Trainer, shares: Sequence[Share], *, step: int) -> StepReport:
    """What `update_policy` reports, of a window that changes nothing: no loss, no gradient, learning rate 0.

    Recorded and recomputed log-probs are compared all the same. All ranks call this alike.
    """
    totals = Totals(trainer.policy.device)
    for share in shares:
        for batch, old_N in zip(share.batches, old_logprobs(trainer, share), strict=True):
            totals.add(gap_sums(old_N, batch))
    totals.all_reduce()
    return report(totals, step=step, num_action_tokens=sum(share.num_action_tokens for share in shares))
