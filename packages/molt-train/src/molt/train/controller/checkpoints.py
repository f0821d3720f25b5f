"""The `checkpoints/` folder of a run: one folder a step, whole or absent."""

import re
import shutil
from pathlib import Path

_STEP = re.compile(r"step-(\d{6,})")


class Checkpoints:
    """Checkpoints by step. One is written beside its name and renamed when it is whole."""

    def __init__(self, folder: Path, *, keep: int):
        self._folder, self._keep = folder, keep
        folder.mkdir(parents=True, exist_ok=True)

    def begin(self, step: int) -> Path:
        """A fresh folder to write the checkpoint of `step` into."""
        partial = self._folder / f"{_name(step)}.partial"
        shutil.rmtree(partial, ignore_errors=True)
        return partial

    def commit(self, step: int) -> Path:
        """The checkpoint of `step` is whole; older ones than the last `keep` are removed."""
        final = self._folder / _name(step)
        shutil.rmtree(final, ignore_errors=True)
        (self._folder / f"{final.name}.partial").rename(final)
        for old in self.steps()[: -self._keep]:
            shutil.rmtree(self._folder / _name(old))
        return final

    def steps(self) -> list[int]:
        """Steps that have a checkpoint, ascending."""
        found = (_STEP.fullmatch(entry.name) for entry in self._folder.iterdir())
        return sorted(int(match[1]) for match in found if match)

    def latest(self) -> tuple[int, Path] | None:
        """The newest checkpoint."""
        steps = self.steps()
        return (steps[-1], self._folder / _name(steps[-1])) if steps else None


def _name(step: int) -> str:
    return f"step-{step:06d}"
