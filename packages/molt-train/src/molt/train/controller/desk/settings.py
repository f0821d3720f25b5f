"""What leases and sessions are given."""

import msgspec

from molt.agents.protocol import SamplingParams
from molt.train.config import Config
from molt.train.gateway.sessions import SamplingPolicy
from molt.train.trajectory import DEFAULT_RULES, TrainingRules

HEARTBEATS_A_TTL = 3
"""Heartbeats that are due while a lease lives; a worker may miss all but one."""


class DeskSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What leases and sessions are given."""

    url: str
    """The server's origin as workers reach it."""
    model_name: str
    sampling_params: SamplingParams
    eval_sampling: SamplingParams | None = None
    """Of leases of an evaluation, where it is another."""
    sampling_policy: SamplingPolicy
    group_size: int
    """Sessions that make a group, where no worker drives them."""
    timeout_s: float
    """Seconds a rollout may take."""
    heartbeat_s: float
    session_idle_s: float
    """Seconds without a model call after which a session that no worker drives is closed."""
    reward_wait_s: float
    """Seconds after its last model call in which its result is still taken."""
    seed: int | None = None
    """What the sampling seeds of leases are made of; None: they have none."""
    rules: TrainingRules = DEFAULT_RULES
    """What of the recordings is trained."""
    max_closed_sessions: int = 256
    """Sessions that the gateway still knows after they closed; of older ones it says, as of strangers, unauthorized."""
    max_polls: int = 1024
    """Requests for leases that may wait at once."""

    @classmethod
    def of(cls, config: Config, url: str) -> "DeskSettings":
        """As a run's configuration says."""
        rollout, pool = config.rollout, config.pool
        return cls(
            url=url,
            model_name=config.model.name,
            sampling_params=SamplingParams(
                max_tokens=rollout.max_tokens, temperature=rollout.temperature, top_p=rollout.top_p
            ),
            eval_sampling=_eval_sampling(config),
            sampling_policy=rollout.sampling_policy,
            group_size=rollout.group_size,
            timeout_s=rollout.timeout_s,
            heartbeat_s=pool.lease_ttl_s / HEARTBEATS_A_TTL,
            session_idle_s=pool.session_idle_s,
            reward_wait_s=pool.reward_wait_s,
            seed=config.run.seed if rollout.seeded else None,
            rules=TrainingRules.of(config),
        )


def _eval_sampling(config: Config) -> SamplingParams:
    """`[eval]`, and `[rollout]` for what it leaves open."""
    rollout, evaluation = config.rollout, config.eval
    return SamplingParams(
        max_tokens=evaluation.max_tokens or rollout.max_tokens,
        temperature=rollout.temperature if evaluation.temperature is None else evaluation.temperature,
        top_p=rollout.top_p if evaluation.top_p is None else evaluation.top_p,
    )
