"""An evaluation as a table: a line a data set, and one for all together."""

from collections.abc import Mapping
from typing import Any

OVERALL = "all"


def format_evaluation(row: Mapping[str, Any]) -> str:
    """A row of `evaluations.jsonl` for people. A dash stands for what nothing could be said of."""
    parts = {**row.get("datasets", {}), OVERALL: row}
    measured = [name for name in row if name.startswith(("pass@", "avg@"))]
    header = ["data set", "tasks", "rollouts", "missing", "reward", *measured]
    lines = [header, *(_line(name, part, measured) for name, part in parts.items())]
    widths = [max(len(line[i]) for line in lines) for i in range(len(header))]
    return "\n".join(
        "  ".join([line[0].ljust(widths[0]), *(cell.rjust(w) for cell, w in zip(line[1:], widths[1:], strict=True))])
        for line in lines
    )


def _line(name: str, part: Mapping[str, Any], measured: list[str]) -> list[str]:
    error = part["standard_error"]
    reward = f"{part['reward_mean']:.3f}" + ("" if error is None else f" ± {error:.3f}")
    counts = [str(part[key]) for key in ("num_tasks", "num_rollouts", "num_missing")]
    return [name, *counts, reward, *("-" if part[key] is None else f"{part[key]:.3f}" for key in measured)]
