"""Load an agent module, from a file or by its dotted name, and make its AgentRunner."""

import importlib
import importlib.util
import sys
import traceback
from pathlib import Path
from types import ModuleType

from molt.agents.errors import AgentLoadError
from molt.agents.runner import FILE_MODULE_PREFIX, AgentRunner


def load_runner(agent: str) -> AgentRunner:
    """Make the runner of an agent module.

    A file may import its neighbours, as under `python FILE`; a dotted name is looked up from the working directory
    too, as under `python -m NAME`.

    Args:
        agent: A path that ends in `.py`, or `package.module`.

    Raises:
        AgentLoadError: The module is missing, fails to import, or exports no usable `AgentRunner`.
    """
    module = _load_file(Path(agent)) if agent.endswith(".py") else _load_dotted(agent)
    runner_class = getattr(module, "AgentRunner", None)
    if runner_class is None or runner_class is AgentRunner:
        raise AgentLoadError(f"{agent}: exports no AgentRunner: define `class AgentRunner(ChatAgentRunner)` in it")
    try:
        runner = runner_class()
    except (Exception, SystemExit) as exc:
        raise AgentLoadError(f"{agent}: AgentRunner() failed: {_describe(exc, module.__file__)}") from exc
    if not isinstance(runner, AgentRunner):
        raise AgentLoadError(
            f"{agent}: AgentRunner is no molt.agents.AgentRunner: derive it from ChatAgentRunner or StepEnvRunner"
        )
    return runner


def _load_file(path: Path) -> ModuleType:
    path = path.resolve()
    if not path.is_file():
        raise AgentLoadError(f"{path}: no such file")
    _look_in(path.parent)
    name = f"{FILE_MODULE_PREFIX}{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise AgentLoadError(f"{path}: not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # type hints and pickles of the agent's classes are resolved through it
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as exc:
        del sys.modules[name]
        raise AgentLoadError(f"{path}: cannot be imported: {_describe(exc, str(path))}") from exc
    return module


def _load_dotted(name: str) -> ModuleType:
    _look_in(Path.cwd())
    try:
        return importlib.import_module(name)
    except (Exception, SystemExit) as exc:
        missing = exc.name if isinstance(exc, ModuleNotFoundError) else None
        if missing is not None and f"{name}.".startswith(f"{missing}."):
            raise AgentLoadError(f"{name}: no such module: give its dotted name, or a path ending in .py") from exc
        raise AgentLoadError(f"{name}: cannot be imported: {_describe(exc, _origin(name))}") from exc


def _look_in(folder: Path) -> None:
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))


def _origin(name: str) -> str | None:
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):  # a parent package that fails itself
        return None
    return None if spec is None else spec.origin


def _describe(error: BaseException, own_file: str | None) -> str:
    """One line: where in the agent module, then what."""
    if isinstance(error, SyntaxError):
        return f"{error.filename}, line {error.lineno}: SyntaxError: {error.msg}"
    own_lines = [line for frame, line in traceback.walk_tb(error.__traceback__) if frame.f_code.co_filename == own_file]
    where = f"line {own_lines[-1]}: " if own_lines else ""
    return " ".join(f"{where}{type(error).__name__}: {error}".split())
