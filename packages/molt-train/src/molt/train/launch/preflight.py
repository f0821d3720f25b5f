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
from molt.train.pool.tasks import Dataset, load_datasets
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

    train_sets: list[Dataset]
    eval_sets: list[Dataset]
    renderer: ChatRenderer
    parser: Parser
    sock: socket.socket
    """Bound, not yet listened on."""

    @property
    def eval_tasks(self) -> list[Task]:
        """Those of all evaluation sets, in their order."""
        return [task for one in self.eval_sets for task in one.tasks]


def preflight(config: Config, *, local_workers: bool) -> Preflight:
    """Check `config` against the machine. Raises ConfigError."""
    from molt.train.advantage import find_estimator  # torch, which the gateway alone does without

    check(config)
    require(config, "model.path", *(() if config.data.sets else ("data.path",)), "run.dir")
    train_sets = load_datasets(config.data.path, config.data.sets)
    eval_sets = load_datasets(config.eval.path, config.eval.sets)
    find_estimator(config.algorithm.estimator)
    renderer = load_renderer(config.model.path)
    parser = choose_parser(config.model, renderer)
    check_same_tokens(config)
    if local_workers:
        require(config, "agent.path")
        check_agent(config.agent.path)
    sock = bind(config.server.host, config.server.port, token=config.server.token)
    return Preflight(train_sets=train_sets, eval_sets=eval_sets, renderer=renderer, parser=parser, sock=sock)


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


def check_agent(path: str) -> None:
    """Raise ConfigError where the agent module at `path` cannot be loaded, or has no `AgentRunner`."""
    # In a process of its own: the agent's imports are the workers' affair.
    command = [sys.executable, "-c", _LOAD_AGENT, path]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=AGENT_CHECK_S, check=False)
    except subprocess.TimeoutExpired:
        raise ConfigError(f"agent.path is {path!r}, whose import takes over {AGENT_CHECK_S:.0f} s") from None
    if result.returncode != 0:
        raise ConfigError(result.stderr.strip().splitlines()[-1])
