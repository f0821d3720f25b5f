"""`molt-train status RUN_DIR`: what a run is doing, and who waits for whom."""

import os
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import httpx
import msgspec

from molt.train.controller.run_folder import RunFolder
from molt.train.controller.run_status import RunStatus, read_status

ASK_TIMEOUT_S = 5.0
NO_TOKEN = "set MOLT_TOKEN to the server's token to see what it says of itself"
_WIDTH = 100
"""Characters of an error that a line shows."""


def run_status(run_dir: Path, *, as_json: bool) -> str:
    """The status of the run in `run_dir`, as text or as one line of JSON.

    It comes from the folder alone, and, where a server is at work on this machine and `MOLT_TOKEN` is its token, from
    that, too. Raises ConfigError when the folder holds no run.
    """
    status = read_status(RunFolder(run_dir))
    if status.url:
        status = msgspec.structs.replace(status, live=_ask(status.url, os.environ.get("MOLT_TOKEN", "")))
    return msgspec.json.encode(status).decode() if as_json else render(status)


def _ask(url: str, token: str) -> dict[str, Any]:
    if not token:
        return {"error": NO_TOKEN}
    try:
        reply = httpx.get(
            f"{url}/api/v1/status", headers={"authorization": f"Bearer {token}"}, timeout=ASK_TIMEOUT_S, trust_env=False
        )
        reply.raise_for_status()
        return msgspec.json.decode(reply.content, type=dict[str, Any])
    except (httpx.HTTPError, msgspec.DecodeError) as error:
        return {"error": f"{url} does not answer: {error}"}


def render(status: RunStatus) -> str:
    """The status as text, one thing a line."""
    lines = [f"{status.folder}: {status.state}" + (f" ({status.reason})" if status.reason else "")]
    lines.append(f"update {status.updates} of {status.num_updates}, policy version {status.policy_version}")
    if status.rewards:
        lines.append("reward: " + ", ".join(f"{value:.3f} (update {step})" for step, value in status.rewards.items()))
    if status.evaluation is not None:
        evaluation = status.evaluation
        lines.append(f"evaluation after update {evaluation['step']}: {evaluation['reward_mean']:.3f}")
    best = "" if status.best is None else f"; best: {status.best}"
    lines.append("checkpoints: " + (", ".join(map(str, status.checkpoints)) or "none") + best)
    lines += _counts("groups", status.groups)
    lines += _counts("leases", status.leases)
    lines += _counts("groups dropped", status.dropped)
    lines += _counts("left out of windows", status.left_out)
    lines += _counts("deaths and restarts", status.counts)
    for task_id, errors in status.quarantined.items():
        lines.append(f"task {task_id} is in quarantine: " + "; ".join(f"{error:.{_WIDTH}}" for error in errors))
    lines += _live(status.live or {})
    lines += ["last events:"] if status.events else []
    for event in status.events:
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(event.time))
        detail = ", ".join(f"{name} {value}" for name, value in event.detail.items())
        lines.append(f"  {when} {event.kind} {detail:.{2 * _WIDTH}}".rstrip())
    return "\n".join(lines)


def _counts(name: str, counts: Mapping[str, int]) -> Iterable[str]:
    return [f"{name}: " + ", ".join(f"{count} {what}" for what, count in sorted(counts.items()))] if counts else []


def _live(live: Mapping[str, Any]) -> list[str]:
    """What the server says of itself, as text."""
    if "error" in live:
        return [live["error"]]
    lines = [f"waits: {wait}" for wait in live.get("waits", ())]
    pool = live.get("pool", {})
    if live:
        lines.append(
            f"serving version {live.get('policy_version')}; {pool.get('num_open')} groups open, "
            f"{pool.get('num_ready')} ready; {pool.get('num_waiting')} rollouts wait for a worker"
        )
    lines += [f"engine {number}: {load} requests" for number, load in sorted(live.get("engines", {}).items())]
    for worker in pool.get("workers", ()):
        lines.append(f"worker {worker['worker_id']}: {worker['leases']} leases, heard of {worker['seen_s']:.0f} s ago")
    for unmatched in pool.get("unmatched", ()):
        lines.append(f"{unmatched['num_waiting']} rollouts wait for a worker with labels {unmatched['labels']}")
    return lines
