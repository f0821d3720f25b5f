"""The reward curve of a run as a PNG."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def draw_reward_curve(
    rows: Sequence[Mapping[str, Any]], path: Path, *, evaluations: Sequence[tuple[int, float]] = ()
) -> None:
    """Draw mean reward over updates, and evaluation scores as points when there are any.

    Args:
        rows: Objects of `metrics.jsonl`; `step` and `reward_mean` are read.
        path: The PNG to write.
        evaluations: (update, mean score) pairs; update 0 is before the first one.
    """
    # Imported here: it costs half a second, and a run draws once. Without pyplot there is no global state, and a Figure
    # on its own renders with Agg, which needs no display.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    axes.plot([row["step"] for row in rows], [row["reward_mean"] for row in rows], label="training, mean of the window")
    if evaluations:
        steps, scores = zip(*evaluations, strict=True)
        axes.plot(steps, scores, "o", label="evaluation, held-out tasks")
    axes.set_xlabel("update")
    axes.set_ylabel("mean reward")
    axes.grid(visible=True, alpha=0.3)
    axes.legend(loc="lower right")
    figure.savefig(path, format="png", dpi=120)
