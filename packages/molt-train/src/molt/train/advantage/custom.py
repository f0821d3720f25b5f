"""Estimators of the user's own, by where they are: no change to Molt is needed to add one."""

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

from molt.train.errors import ConfigError


def load_function(place: str) -> object:
    """What stands at `FILE.py:FUNCTION`, from the working directory, or at `module:FUNCTION` of an installed package.

    Raises:
        ConfigError: There is no such file, module or name, or it fails to import, or is not a function.
    """
    where, _, name = place.rpartition(":")
    try:
        module = _run_file(Path(where)) if where.endswith(".py") else importlib.import_module(where)
    except (Exception, SystemExit) as error:
        cause = " ".join(f"{type(error).__name__}: {error}".split())
        raise ConfigError(
            f"algorithm.estimator is {place!r}, which cannot be imported ({cause}): "
            "give FILE.py:FUNCTION or module:FUNCTION"
        ) from error
    function = getattr(module, name, None)
    if not callable(function):
        raise ConfigError(
            f"algorithm.estimator is {place!r}, but {where} has no function {name!r}: define it, or correct the name"
        )
    return function


def _run_file(path: Path) -> ModuleType:
    name = f"molt_estimator_{path.stem}"  # a file rloo.py must not hide an installed package `rloo`
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses of the file look their module up
    spec.loader.exec_module(module)
    return module
