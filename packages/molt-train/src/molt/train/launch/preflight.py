"""What can be found wrong before anything is started: each fault is one line that names the key and the fix."""

import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from molt.train.config import Config, check
from molt.train.errors import ConfigError
from molt.train.gateway.parse import Parser
from molt.train.gateway.render import ChatRenderer
from molt.train.gateway.render_library import FamilyRenderer
from molt.train.launch.reply_format import choose_parser
from molt.train.launch.same_tokens import check_same_tokens
from molt.train.pool.tasks import load_tasks
from molt.train.records.rollout import Task
from molt.train.server import bind

AGENT_CHECK_S = 60.0
_LOAD_AGENT = """
import sys
from molt.agents.errors import MoltAgentError
from molt.agents.load import load_runner
try:
    load_runner(sys.argv[1])
except MoltAgentError as error:
    sys.exit(f"agent.path: {error}")
"""


@dataclass(frozen=True)
class Preflight:
    """What the checks have opened on the way."""

    tasks: list[Task]
    eval_tasks: list[Task]
    renderer: ChatRenderer
    parser: Parser
    sock: socket.socket
    """Bound, not yet listened on."""


def preflight(config: Config, *, local_workers: bool) -> Preflight:
    """Check `config` against the machine. Raises ConfigError."""
    from molt.train.advantage import find_estimator  # torch, which the gateway alone does without

    check(config)
    require(config, "model.path", "data.path", "run.dir")
    tasks = load_tasks(Path(config.data.path))
    eval_tasks = load_tasks(Path(config.eval.path)) if config.eval.path else []
    find_estimator(config.algorithm.estimator)
    renderer = load_renderer(config.model.path)
    parser = choose_parser(config.model, renderer)
    check_same_tokens(config)
    if local_workers:
        require(config, "agent.path")
        _check_agent(config.agent.path)
    sock = bind(config.server.host, config.server.port, token=config.server.token)
    return Preflight(tasks=tasks, eval_tasks=eval_tasks, renderer=renderer, parser=parser, sock=sock)


def require(config: Config, *keys: str) -> None:
    """Raise ConfigError for the first of `keys` that is empty."""
    for key in keys:
        section, name = key.split(".")
        if not getattr(getattr(config, section), name):
            raise ConfigError(f"{key} is empty: give it in the config file, or as {key}=...")


def load_renderer(model_path: str) -> ChatRenderer:
    """The renderer of the model at `model_path`, a folder or a hub name."""
    looks_local = model_path.startswith((".", "/", "~")) or model_path.count("/") > 1
    if looks_local and not Path(model_path).is_dir():
        raise ConfigError(f"model.path is {model_path!r}, which is no folder")
    return FamilyRenderer(model_path)


def _check_agent(path: str) -> None:
    # In a process of its own: the agent's imports are the workers' affair.
    command = [sys.executable, "-c", _LOAD_AGENT, path]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=AGENT_CHECK_S, check=False)
    except subprocess.TimeoutExpired:
        raise ConfigError(f"agent.path is {path!r}, whose import takes over {AGENT_CHECK_S:.0f} s") from None
    if result.returncode != 0:
        raise ConfigError(result.stderr.strip().splitlines()[-1])
