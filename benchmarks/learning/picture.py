"""The figures of the documentation: reward by update, a line a seed."""

from pathlib import Path
from typing import Any

COLOURS = ("#0b6e99", "#d9730d", "#448361")
LAG = ("lag8_corrected", "lag8_uncorrected")


def draw(curves: dict[str, dict[str, Any]], folder: Path) -> None:
    """Draw `algorithms.png`, and `correction.png` where the lagging arms were run."""
    algorithms = [arm for arm in curves if arm not in LAG]
    if algorithms:
        _draw(curves, algorithms, folder / "algorithms.png")
    lagging = [arm for arm in LAG if arm in curves]
    if lagging:
        _draw(curves, lagging, folder / "correction.png")


def _draw(curves: dict[str, dict[str, Any]], arms: list[str], path: Path) -> None:
    from matplotlib.figure import Figure

    num_columns = min(3, len(arms))
    num_rows = -(-len(arms) // num_columns)
    figure = Figure(figsize=(4 * num_columns, 2.8 * num_rows), layout="constrained")
    axes = figure.subplots(num_rows, num_columns, sharex=True, sharey=True, squeeze=False)
    for arm, panel in zip(arms, axes.flat, strict=False):
        for colour, (seed, curve) in zip(COLOURS, sorted(curves[arm]["seeds"].items()), strict=False):
            panel.plot(range(1, len(curve["reward"]) + 1), curve["reward"], color=colour, label=f"seed {seed}")
        panel.axhline(0.8, color="grey", linewidth=0.7, linestyle="--")
        panel.set_title(arm)
        panel.set_ylim(0, 1)
    for panel in axes[-1]:
        panel.set_xlabel("update")
    for row in axes:
        row[0].set_ylabel("mean reward")
    axes.flat[0].legend(loc="lower right", fontsize="small")
    figure.savefig(path, dpi=110)
