"""The command `molt-agent`: `work` for a trainer, `try` an agent without one.

Exit codes: 0 done, 1 failed, 2 bad input. Results go to stdout, logs to stderr.
"""

import argparse
import asyncio
import logging
import math
import os
import signal
import sys
import threading
from collections import Counter
from contextlib import aclosing
from pathlib import Path
from typing import NoReturn
from urllib.parse import urlsplit

import msgspec

from molt.agents.control import ControlApi
from molt.agents.errors import AuthenticationError, InputError, MoltAgentError
from molt.agents.load import load_runner
from molt.agents.protocol import ResultReport, SamplingParams, SessionCredentials
from molt.agents.tasks import read_tasks
from molt.agents.trial import try_tasks
from molt.agents.worker import Worker

EXIT_LIMIT_S = 5.0
"""How long threads that an agent left behind may delay the end of the process."""
SWITCH_S = 0.001
"""How long a thread that computes keeps the interpreter from the others: a fifth of Python's own, since a turn of each
rollout waits for it several times."""

log = logging.getLogger(__name__)


def main(argv: list[str] | None = None) -> int:
    """Run the command.

    Args:
        argv: The arguments; None takes those of the process, which then ends soon after, whatever threads still run.

    Returns:
        The exit code.
    """
    args = _parser().parse_args(argv)
    logging.basicConfig(stream=sys.stderr, format="%(asctime)s %(levelname)s %(message)s")
    logging.getLogger("molt.agents").setLevel(args.log_level)
    try:
        return asyncio.run(_run(args, owns_process=argv is None))
    except KeyboardInterrupt:
        return _say("interrupted", 1)
    except BrokenPipeError:  # whoever read stdout has gone; the interpreter's last flush must not raise again
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


async def _run(args: argparse.Namespace, *, owns_process: bool) -> int:
    try:
        code: int = await args.command(args)
    except InputError as exc:
        code = _say(f"error: {exc}", 2)
    except AuthenticationError as exc:
        code = _say(f"error: {exc}: pass the trainer's worker token with --token or MOLT_TOKEN", 2)
    except MoltAgentError as exc:
        code = _say(f"error: {exc}", 1)
    if owns_process:
        timer = threading.Timer(EXIT_LIMIT_S, _leave_threads, (code,))
        timer.daemon = True
        timer.start()
    return code


def _leave_threads(code: int) -> None:
    _say("leaving threads of the agent that do not end", code)
    sys.stdout.flush()
    os._exit(code)


def _say(message: str, code: int) -> int:
    print(f"molt-agent: {message}", file=sys.stderr, flush=True)
    return code


async def _work(args: argparse.Namespace) -> int:
    token = args.token or os.environ.get("MOLT_TOKEN")
    if not token:
        raise InputError("no token: pass --token, or set MOLT_TOKEN")
    worker = Worker(
        load_runner(args.agent),
        ControlApi(args.server, token=token, give_up_s=args.server_timeout),
        concurrency=args.concurrency,
        drain_s=args.drain_s,
        labels=_labels(args.label),
        parent_pid=args.exit_with_parent,
    )
    for signum in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(signum, worker.stop)
    sys.setswitchinterval(SWITCH_S)
    log.info("worker %s serves %s, %d rollouts at once", worker.worker_id, args.server, args.concurrency)
    await worker.run()
    log.info("worker %s is done, results: %s", worker.worker_id, dict(worker.outcomes))
    return 0


async def _try(args: argparse.Namespace) -> int:
    rows = read_tasks(args.tasks, limit=args.limit)
    session = SessionCredentials(
        session_id="try",
        session_url=args.base_url.removesuffix("/v1"),
        base_url=args.base_url,
        api_key=args.api_key,
        model_name=args.model,
    )
    sampling_params = SamplingParams(max_tokens=args.max_tokens, temperature=args.temperature)
    reports: list[ResultReport] = []
    results = try_tasks(
        load_runner(args.agent), rows, session=session, sampling_params=sampling_params, concurrency=args.concurrency
    )
    async with aclosing(results):
        async for index, report in results:
            reports.append(report)
            _print_json({"task": index, "outcome": report.outcome, "reward": report.reward, "error": report.error})
    rewards = [report.reward for report in reports if report.reward is not None]
    mean_reward = math.fsum(rewards) / len(rewards) if rewards else None
    outcomes = Counter(report.outcome for report in reports)
    _print_json({"summary": {"mean_reward": mean_reward, "num_tasks": len(reports), "outcomes": outcomes}})
    return 0 if rewards else 1


def _print_json(line: object) -> None:
    print(msgspec.json.encode(line).decode(), flush=True)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"molt-agent: error: {message}\n")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="molt-agent", description="Run agents: for a Molt trainer, or to try them.")
    commands = parser.add_subparsers(required=True, metavar="{work,try}")

    work = commands.add_parser("work", help="run rollouts for a trainer until it is finished")
    work.set_defaults(command=_work, log_level=logging.INFO)
    work.add_argument("agent", metavar="AGENT", help="agent module: FILE.py or package.module")
    work.add_argument("--server", type=_url, required=True, metavar="URL", help="the trainer")
    work.add_argument("--token", help="the trainer's worker token; default: the environment's MOLT_TOKEN")
    work.add_argument("--concurrency", type=_count, default=8, metavar="N", help="rollouts at once (8)")
    work.add_argument(
        "--label",
        type=_label,
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="what this worker has that tasks may ask for; may be given again",
    )
    work.add_argument(
        "--drain-s", type=_amount, default=30.0, metavar="S", help="time to finish rollouts after SIGTERM (30)"
    )
    work.add_argument(
        "--server-timeout", type=_amount, default=60.0, metavar="S", help="give up a server gone for so long (60)"
    )
    work.add_argument("--exit-with-parent", type=int, metavar="PID", help="stop when this parent process is gone")

    trial = commands.add_parser("try", help="run an agent against any OpenAI-compatible endpoint")
    trial.set_defaults(command=_try, log_level=logging.DEBUG)
    trial.add_argument("agent", metavar="AGENT", help="agent module: FILE.py or package.module")
    trial.add_argument("--tasks", type=Path, required=True, metavar="FILE.jsonl", help="one task row a line")
    trial.add_argument("--base-url", type=_base_url, required=True, metavar="URL", help="the endpoint; ends in /v1")
    trial.add_argument("--api-key", required=True, metavar="K")
    trial.add_argument("--model", required=True, metavar="NAME")
    trial.add_argument("--concurrency", type=_count, default=8, metavar="N", help="tasks at once (8)")
    trial.add_argument("--limit", type=_count, metavar="N", help="run the first N tasks only")
    trial.add_argument("--max-tokens", type=_count, default=SamplingParams().max_tokens, metavar="N")
    trial.add_argument("--temperature", type=_amount, default=SamplingParams().temperature, metavar="T")
    return parser


def _label(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not (equals and name.strip() and value.strip()):
        raise argparse.ArgumentTypeError(f"{text!r}: use NAME=VALUE, such as arch=arm64")
    return name.strip(), value.strip()


def _labels(given: list[tuple[str, str]]) -> dict[str, str]:
    """The labels by name. Raises InputError for a name that has two values."""
    labels: dict[str, str] = {}
    for name, value in given:
        if labels.setdefault(name, value) != value:
            raise InputError(f"--label {name}: it is {labels[name]!r} and {value!r}: give each name one value")
    return labels


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: use a whole number, 1 or more")
    return int(text)


def _amount(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0.0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r}: use a number, 0 or more")
    return value


def _url(text: str) -> str:
    url = urlsplit(text)
    if url.scheme not in ("http", "https") or not url.hostname:
        raise argparse.ArgumentTypeError(f"{text!r}: use http://HOST:PORT, or https")
    return text.rstrip("/")


def _base_url(text: str) -> str:
    url = _url(text)
    if not url.endswith("/v1"):
        raise argparse.ArgumentTypeError(f"{text!r}: it ends in /v1, as the OpenAI SDK takes it")
    return url
