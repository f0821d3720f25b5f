"""What every command needs around it: a run folder, logs, Ray."""

import contextlib
import os
import secrets
from collections.abc import Iterator
from pathlib import Path

import msgspec

from molt.train.config import Config, to_toml
from molt.train.controller.run_folder import RunFolder
from molt.train.errors import ConfigError
from molt.train.observe.logs import configure_logging


def make_folder(config: Config) -> RunFolder:
    """The run folder, made unless it is there. Raises ConfigError where that cannot be."""
    folder = RunFolder(Path(config.run.dir))
    try:
        folder.path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"run.dir is {config.run.dir!r}, where no folder can be made: {error.strerror}") from None
    return folder


def open_folder(config: Config, *, secret: str) -> RunFolder:
    """Write the resolved configuration into the run folder, and log into it; `secret` appears in neither."""
    folder = make_folder(config)
    configure_logging(folder.logs / "server.log", secrets=(secret,))
    public = msgspec.structs.replace(config, server=msgspec.structs.replace(config.server, token=""))
    folder.config.write_text(to_toml(public))
    return folder


def set_ray_variables(*, is_local: bool) -> None:
    """Set what Ray reads when it is imported, or once a process; `is_local`: for a cluster of this process's own."""
    if is_local:
        # It takes orders from nobody else on the machine.
        os.environ["RAY_AUTH_MODE"] = "token"
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
        os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    # Under `uv run` Ray would have uv build the environment of every process again.
    os.environ["RAY_ENABLE_UV_RUN_RUNTIME_ENV"] = "0"


@contextlib.contextmanager
def ray(config: Config, folder: RunFolder) -> Iterator[None]:
    """Ray for the time of the block."""
    set_ray_variables(is_local=not config.cluster.address)
    from molt.train.cluster.runtime import ray_runtime  # Ray takes half a second to import, and not all commands use it

    with ray_runtime(address=config.cluster.address, logs=folder.logs):
        yield


def worker_environment(token: str) -> dict[str, str]:
    """The environment of local workers: this process's, the token, and one thread each, since the cores are shared."""
    return {**os.environ, "MOLT_TOKEN": token, "OMP_NUM_THREADS": "1"}
