"""The folder of a command that looks at a run and must not write into it."""

from pathlib import Path

from molt.train.errors import ConfigError


def new_folder(out: Path | None, *, run_dir: Path | None, name: str) -> Path:
    """`out`, or the first of RUN_DIR-NAME-1, -2, ... beside `run_dir` that does not exist. Nothing is made.

    Raises ConfigError when `out` holds something already, or lies in the run's folder, or there is neither.
    """
    if out is None:
        if run_dir is None:
            raise ConfigError("run.dir is empty: give the folder of the run, or --out DIR")
        base, number = run_dir.resolve(), 1
        while (folder := base.with_name(f"{base.name}-{name}-{number}")).exists():
            number += 1
        return folder
    out = out.resolve()
    if run_dir is not None and (out == run_dir.resolve() or run_dir.resolve() in out.parents):
        raise ConfigError(f"--out is {str(out)!r}, in the folder of the run itself: give one outside of it")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"--out is {str(out)!r}, which exists: give a new folder")
    return out
