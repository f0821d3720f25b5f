"""The `checkpoints/` folder of a run: one folder a step, whole or absent, and `best`, a link to one of them."""

import os
import re
import shutil
from pathlib import Path

BEST = "best"
_STEP = re.compile(r"step-(\d{6,})")


class Checkpoints:
    """Checkpoints by step. One is written beside its name, and renamed when it is whole and on the disk."""

    def __init__(self, folder: Path, *, keep: int):
        self._folder, self._keep = folder, keep
        folder.mkdir(parents=True, exist_ok=True)

    def begin(self, step: int) -> Path:
        """A fresh folder to write the checkpoint of `step` into."""
        partial = self._folder / f"{_name(step)}.partial"
        shutil.rmtree(partial, ignore_errors=True)
        return partial

    def commit(self, step: int) -> Path:
        """The checkpoint of `step` is whole; of the older ones the last `keep` and the best one stay.

        When this returns no loss of power takes it: its files are forced to the disk before it gets its name, and the
        name before an older checkpoint goes.
        """
        final = self._folder / _name(step)
        partial = self._folder / f"{final.name}.partial"
        _sync_tree(partial)
        if final.exists():
            self._remove(final)
        partial.rename(final)
        _sync(self._folder)
        self._prune()
        return final

    def steps(self) -> list[int]:
        """Steps that have a checkpoint, ascending."""
        return steps_in(self._folder)

    def latest(self) -> tuple[int, Path] | None:
        """The newest checkpoint."""
        steps = self.steps()
        return (steps[-1], self._folder / _name(steps[-1])) if steps else None

    @property
    def best(self) -> int | None:
        """The step of the best checkpoint; None when none is marked."""
        match = _STEP.fullmatch((self._folder / BEST).resolve().name)
        return int(match[1]) if match and int(match[1]) in self.steps() else None

    def mark_best(self, step: int) -> None:
        """Link `best` to the checkpoint of `step`; the former best one stays only if it is new enough.

        Raises ValueError when there is no such checkpoint.
        """
        if step not in self.steps():
            raise ValueError(f"update {step} has no checkpoint, so it cannot be marked as the best")
        partial = self._folder / f"{BEST}.partial"
        partial.unlink(missing_ok=True)
        partial.symlink_to(_name(step))
        partial.replace(self._folder / BEST)  # whoever looks meanwhile finds the old link or the new one
        self._prune()

    def _prune(self) -> None:
        best = self.best
        for old in self.steps()[: -self._keep]:
            if old != best:
                self._remove(self._folder / _name(old))

    def _remove(self, checkpoint: Path) -> None:
        # Under another name: a process that is killed meanwhile leaves no half of a checkpoint under its own.
        doomed = checkpoint.with_name(f"{checkpoint.name}.removed")
        shutil.rmtree(doomed, ignore_errors=True)
        checkpoint.rename(doomed)
        shutil.rmtree(doomed)


def steps_in(folder: Path) -> list[int]:
    """The steps that have a checkpoint in `folder`, ascending."""
    found = (_STEP.fullmatch(entry.name) for entry in folder.iterdir())
    return sorted(int(match[1]) for match in found if match)


def _sync_tree(folder: Path) -> None:
    for entry in folder.iterdir():
        if entry.is_dir() and not entry.is_symlink():
            _sync_tree(entry)
        else:
            _sync(entry)
    _sync(folder)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _name(step: int) -> str:
    return f"step-{step:06d}"
