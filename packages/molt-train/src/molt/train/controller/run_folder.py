"""What a run folder holds, and what it says about the run."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from molt.train.observe.journal import read_journal
from molt.train.observe.picture import draw_reward_curve


@dataclass(frozen=True)
class RunFolder:
    """The files of a run."""

    path: Path

    @property
    def config(self) -> Path:
        """The resolved configuration, without secrets."""
        return self.path / "config.toml"

    @property
    def metrics(self) -> Path:
        """One JSON object an update."""
        return self.path / "metrics.jsonl"

    @property
    def evaluations(self) -> Path:
        """One JSON object an evaluation."""
        return self.path / "evaluations.jsonl"

    @property
    def ledger(self) -> Path:
        """What was leased, sampled and consumed."""
        return self.path / "ledger.db"

    @property
    def traces(self) -> Path:
        """The turns of every session whose recording the ledger has not yet."""
        return self.path / "traces"

    @property
    def checkpoints(self) -> Path:
        """One folder a checkpointed update."""
        return self.path / "checkpoints"

    @property
    def model(self) -> Path:
        """The weights that a supervised step ends with, a Hugging Face folder."""
        return self.path / "model"

    @property
    def logs(self) -> Path:
        """Logs of the server and of every process it started."""
        return self.path / "logs"

    @property
    def stacks(self) -> Path:
        """Where the processes of a run are asked for their stacks."""
        return self.logs / "stacks"

    @property
    def server(self) -> Path:
        """The process at work on the run, and where it serves, while there is one."""
        return self.path / "server.json"

    @property
    def picture(self) -> Path:
        """The reward curve."""
        return self.path / "reward.png"

    def summarise(self, *, seconds: float) -> dict[str, Any]:
        """Draw the reward curve, and say how the run went."""
        rows, evaluations = read_journal(self.metrics), read_journal(self.evaluations)
        points = [(row["step"], row["reward_mean"]) for row in evaluations]
        draw_reward_curve(rows, self.picture, evaluations=points)
        return {
            "num_updates": len(rows),
            "seconds": round(seconds, 1),
            "evaluations": evaluations,
            "folder": str(self.path),
            "picture": str(self.picture),
        }
