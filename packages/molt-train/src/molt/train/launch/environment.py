"""What every command needs around it: a run folder, logs, Ray."""

import contextlib
import os
import secrets
from collections.abc import Iterator
from pathlib import Path

import msgspec

from molt.train.config import Config, to_toml
from molt.train.controller.run_folder import RunFolder
from molt.train.observe.logs import configure_logging


def open_folder(config: Config, *, secret: str) -> RunFolder:
    """Make the run folder, with the resolved configuration in it, and log into it; `secret` appears in neither."""
    folder = RunFolder(Path(config.run.dir))
    folder.path.mkdir(parents=True, exist_ok=True)
    configure_logging(folder.logs / "server.log", secrets=(secret,))
    public = msgspec.structs.replace(config, server=msgspec.structs.replace(config.server, token=""))
    folder.config.write_text(to_toml(public))
    return folder


@contextlib.contextmanager
def ray(config: Config, folder: RunFolder) -> Iterator[None]:
    """Ray for the time of the block."""
    if not config.cluster.address:
        # A cluster of one's own takes orders from nobody else on the machine. Ray reads the token once a process.
        os.environ["RAY_AUTH_MODE"] = "token"
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
        os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    from molt.train.cluster.runtime import ray_runtime  # Ray takes half a second to import, and not all commands use it

    with ray_runtime(address=config.cluster.address, logs=folder.logs):
        yield


def worker_environment(token: str) -> dict[str, str]:
    """The environment of local workers: this process's, the token, and one thread each, since the cores are shared."""
    return {**os.environ, "MOLT_TOKEN": token, "OMP_NUM_THREADS": "1"}
