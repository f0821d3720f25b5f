"""How a window is weighed and laid out: settled once a run."""

from dataclasses import dataclass

from molt.train.config import Config
from molt.train.window.aggregate import Aggregation
from molt.train.window.pack import Layout


@dataclass(frozen=True, kw_only=True)
class WindowPlan:
    """The settings of every window of a run."""

    num_ranks: int
    """Data-parallel ranks, at least 1; ranks that share rows, by context or tensor parallelism, count as one."""
    microbatch_tokens: int
    """Most tokens of a microbatch, padding included."""
    layout: Layout = "padded"
    hidden_size: int = 4096
    """Of the policy: how much attention costs next to the rest."""
    num_steps: int = 1
    """Optimizer steps a window."""
    aggregation: Aggregation = "token_mean"
    aggregation_length: int = 0
    """Tokens that `constant` divides a rollout's sum by."""


def plan_of(config: Config, *, hidden_size: int) -> WindowPlan:
    """The plan of a run, for a policy of `hidden_size`."""
    return WindowPlan(
        num_ranks=config.actor.num_ranks,
        microbatch_tokens=config.train.microbatch_tokens,
        layout=config.actor.layout,
        hidden_size=hidden_size,
        num_steps=config.algorithm.updates_per_window,
        aggregation=config.algorithm.aggregation,
        aggregation_length=config.algorithm.aggregation_length or config.rollout.max_tokens,
    )
