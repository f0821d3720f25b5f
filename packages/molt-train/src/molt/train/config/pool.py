"""`[pool]`: leases, what outcomes count as, self-driven sessions, and the ledger."""

from typing import Literal

from molt.agents.protocol import OutcomeKind
from molt.train.config.section import Section

OutcomePolicy = Literal["train", "mask", "retry", "fail_group"]
"""`train`: it counts, with reward 0 where it has none. `mask`: it is left out of baseline and loss. `retry`: another
attempt while `pool.max_attempts` allows one; then `mask`, or, for infrastructure, `fail_group`. `fail_group`: none of
its group is trained."""


class PoolConfig(Section, frozen=True, kw_only=True):
    """Leases, outcomes, self-driven sessions and the ledger."""

    max_attempts: int = 3
    """Attempts at one rollout before it is given up as its last outcome."""
    lease_ttl_s: float = 30.0
    """Seconds without a heartbeat after which a lease expires."""
    on_failed: OutcomePolicy = "mask"
    """A rollout whose agent failed. `train`: it counts as reward 0. `mask`: it is left out of baseline and loss.
    `retry`: another attempt while there is one, then `mask`. `fail_group`: none of its group is trained."""
    on_timeout: OutcomePolicy = "mask"
    """A rollout that ran out of time; as `on_failed`."""
    on_truncated: OutcomePolicy = "train"
    """A rollout that was cut by a limit of its own and has a reward; `train` counts it with that."""
    on_infrastructure: Literal["retry", "mask", "fail_group"] = "retry"
    """A rollout lost to sandbox, network, engine or worker: never reward 0. `retry`: another attempt while there is
    one, then `fail_group`, for those that outages spare are a biased sample."""
    session_idle_s: float = 3600.0
    """Seconds without a model call after which a session that no worker drives is closed, and its recording kept."""
    reward_wait_s: float = 86400.0
    """Seconds after its last model call in which such a session's result is still taken."""
    group_wait_s: float = 86400.0
    """Seconds after its first session in which the group of such sessions has to fill; afterwards it fails."""
    sync: Literal["window", "always"] = "window"
    """When the ledger is forced to disk: with every `window`, and at least every second, or `always`, before anything
    is acknowledged. The death of the process loses nothing either way; a loss of power at most what came since."""
    min_free_mb: int = 64
    """Free disk space, in MiB, below which no leases are granted, so that results on their way still find room."""

    def counts(self, kind: OutcomeKind) -> bool:
        """Whether a rollout that ended so counts in baseline and loss. One that has no further attempt is masked."""
        match kind:
            case "completed":
                return True
            case "truncated":
                return self.on_truncated == "train"
            case "failed":
                return self.on_failed == "train"
            case "timeout":
                return self.on_timeout == "train"
            case "infrastructure":
                return False
