"""A Ray cluster: the one named by the configuration, or a local one that ends with this process."""

import contextlib
import logging
import shutil
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

import ray

NUM_STARTS = 3

log = logging.getLogger(__name__)


@contextlib.contextmanager
def ray_runtime(*, address: str, logs: Path) -> Iterator[None]:
    """Connect to the cluster at `address`, or start a local one where it is empty, for the time of the block.

    A local cluster has no dashboard and leaves nothing behind but the output of its actors, in the folder `logs`.
    """
    if address:
        ray.init(address=address, log_to_driver=False, configure_logging=False)
        temp = None
    else:
        # Short, since Ray's socket paths must stay under 107 bytes. Actors ask for no CPU: the machine's are shared.
        temp = tempfile.mkdtemp(prefix="molt-")
        _start_local(temp)
    try:
        yield
    finally:
        ray.shutdown()
        if temp is not None:
            _keep_logs(Path(temp), logs)
            shutil.rmtree(temp, ignore_errors=True)


def _start_local(temp: str) -> None:
    """Start a cluster with its files in `temp`. One that is slow to start, as on a busy machine, is started anew.

    Ray itself waits 30 s for its node, which is no setting.
    """
    for left in reversed(range(NUM_STARTS)):
        try:
            ray.init(
                address="local",
                num_cpus=1,
                include_dashboard=False,
                log_to_driver=False,
                configure_logging=False,
                object_store_memory=256 << 20,
                _temp_dir=temp,
            )
        except Exception as error:
            ray.shutdown()
            if "timed out during startup" not in str(error) or not left:
                raise
            log.warning("Ray did not start within the time that it gives itself; it is started anew")
        else:
            return


def _keep_logs(temp: Path, logs: Path) -> None:
    logs.mkdir(parents=True, exist_ok=True)
    for file in temp.glob("session_2*/logs/worker-*"):
        if file.is_file() and file.stat().st_size:
            shutil.copy(file, logs / file.name)


def num_gpus() -> int:
    """GPUs that the cluster offers."""
    return int(ray.cluster_resources().get("GPU", 0))


def node_address() -> tuple[str, int]:
    """This node's address and a port of it that nobody listens on now, for a rendezvous."""
    with socket.socket() as sock:
        sock.bind(("", 0))
        return ray.util.get_node_ip_address(), sock.getsockname()[1]
