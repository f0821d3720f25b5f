"""Stage 6, window: complete groups become the microbatches of every rank, with one denominator over all of them."""

from molt.train.window.aggregate import rollout_weights
from molt.train.window.build import (
    RolloutArrays,
    attach,
    build_rows,
    in_row_order,
    lay_out,
    rollout_arrays,
    window_stats,
)
from molt.train.window.filter import FilterResult, equal_reward, usable
from molt.train.window.plan import WindowPlan, plan_of
from molt.train.window.shape import shape

__all__ = [
    "FilterResult",
    "RolloutArrays",
    "WindowPlan",
    "attach",
    "build_rows",
    "equal_reward",
    "in_row_order",
    "lay_out",
    "plan_of",
    "rollout_arrays",
    "rollout_weights",
    "shape",
    "usable",
    "window_stats",
]
