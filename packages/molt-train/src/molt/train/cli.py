"""The command `molt-train`. Exit codes: 0 done, 1 a check or the run failed, 2 bad input."""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from molt.train.config import Config, cache_folder, load_config
from molt.train.errors import ConfigError, MoltError

EXAMPLES = "molt.examples"
DEMO = "calculator"


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; bad input ends in one line on stderr."""
    args = _parse(argv)
    try:
        return args.run(args)
    except ConfigError as error:
        return _fail(error, 2)
    except MoltError as error:
        return _fail(error, 1)
    except KeyboardInterrupt:
        return _fail("interrupted", 130)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The arguments; overrides may stand anywhere among the options, where argparse takes them in one place only."""
    parser = _parser()
    args, rest = parser.parse_known_args(argv)
    if unknown := [text for text in rest if text.startswith("-") or not hasattr(args, "overrides")]:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    if rest:
        args.overrides = [*args.overrides, *rest]
    return args


def _fail(error: Exception | str, code: int) -> int:
    print(f"molt-train: error: {error}", file=sys.stderr)
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="molt-train", description="Reinforcement learning for agents that exist.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, run, about in (
        ("server", _server, "serve, and train on what workers elsewhere roll out"),
        ("run", _run, "the same, with local workers"),
        ("sft", _sft, "train on conversations, supervised"),
    ):
        command = commands.add_parser(name, help=about)
        command.add_argument("config", type=Path, metavar="CONFIG.toml")
        command.add_argument("overrides", nargs="*", metavar="key.path=value")
        command.set_defaults(run=run)
    demo = commands.add_parser("demo", help="train a small agent on this machine and show its reward rise")
    demo.add_argument("--out", type=Path, help="the run folder; an existing one is resumed (runs/demo-TIME)")
    demo.add_argument("--seed", type=int, default=0)
    demo.add_argument("overrides", nargs="*", metavar="key.path=value")
    demo.set_defaults(run=_demo)
    gateway = commands.add_parser("gateway", help="serve the model endpoint and self-driven sessions alone")
    gateway.add_argument("--model", metavar="PATH", help="a Hugging Face model; not needed by the scripted engine")
    gateway.add_argument("--engine", choices=("vllm", "scripted"), default="vllm")
    gateway.add_argument("--script", type=Path, metavar="FILE.jsonl", help="what the scripted engine samples")
    gateway.add_argument("--engine-log", type=Path, metavar="FILE.jsonl", help="every call of the scripted engine")
    gateway.add_argument("--port", type=int, default=0)
    gateway.add_argument("--token", help="the bearer token of the control API")
    gateway.add_argument("overrides", nargs="*", metavar="key.path=value")
    gateway.set_defaults(run=_gateway)
    _add_commands_on_runs(commands)
    audit = commands.add_parser("audit", help="prove that every trained token was sampled in its row's context")
    audit.add_argument("run_dir", type=Path, metavar="RUN_DIR")
    audit.set_defaults(run=_audit)
    conformance = commands.add_parser("conformance", help="run real clients and agents against the gateway")
    conformance.add_argument("--harness", metavar="NAME", help="one client only; all that are installed by default")
    conformance.add_argument(
        "--python", type=Path, default=Path(sys.executable), help="of the environment that agents run in (this one)"
    )
    conformance.add_argument("--json", action="store_true", help="one JSON object a line instead of a table")
    conformance.set_defaults(run=_conformance)
    return parser


def _add_commands_on_runs(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    evaluation = commands.add_parser("eval", help="evaluate a model or a checkpoint once, with local workers")
    evaluation.add_argument("config", type=Path, metavar="CONFIG.toml")
    evaluation.add_argument(
        "--checkpoint", metavar="DIR|best|latest", help="instead of model.path; best and latest are those of run.dir"
    )
    evaluation.add_argument("--out", type=Path, metavar="DIR", help="its own run folder (RUN_DIR-eval-N)")
    evaluation.add_argument("--json", action="store_true", help="the row as one line of JSON instead of a table")
    evaluation.add_argument("overrides", nargs="*", metavar="key.path=value")
    evaluation.set_defaults(run=_eval)
    replay = commands.add_parser("replay", help="train again from a recorded run, without engines and workers")
    replay.add_argument("run_dir", type=Path, metavar="RUN_DIR")
    replay.add_argument("--out", type=Path, metavar="DIR", help="where to write (RUN_DIR-replay-N)")
    replay.add_argument("--grades", metavar="NAME", help="outcomes of `regrade` instead of the recorded ones")
    replay.add_argument("overrides", nargs="*", metavar="key.path=value")
    replay.set_defaults(run=_replay)
    regrade = commands.add_parser("regrade", help="grade recorded rollouts again")
    regrade.add_argument("run_dir", type=Path, metavar="RUN_DIR")
    regrade.add_argument("--agent", required=True, metavar="AGENT.py", help="the agent that has the grader")
    regrade.add_argument("--name", metavar="NAME", help="of the new grades (regrade-N)")
    regrade.set_defaults(run=_regrade)
    status = commands.add_parser("status", help="say what a run is doing, and who waits for whom")
    status.add_argument("run_dir", type=Path, metavar="RUN_DIR")
    status.add_argument("--json", action="store_true", help="one line of JSON instead of text")
    status.set_defaults(run=_status)


def _server(args: argparse.Namespace) -> int:
    return _train(args, local_workers=False)


def _run(args: argparse.Namespace) -> int:
    return _train(args, local_workers=True)


def _train(args: argparse.Namespace, *, local_workers: bool) -> int:
    config = load_config(args.config, args.overrides, Config)
    from molt.train.launch.training import run_training  # after the config is read: it brings the whole program

    print(summary_line(run_training(config, local_workers=local_workers)))
    return 0


def _sft(args: argparse.Namespace) -> int:
    config = load_config(args.config, args.overrides, Config)
    from molt.train.launch.supervised import run_supervised

    print(json.dumps(run_supervised(config)))
    return 0


def _demo(args: argparse.Namespace) -> int:
    found = entry_points(group=EXAMPLES, name=DEMO)
    if not found:
        raise ConfigError(f"the example {DEMO!r} is not installed: run `make setup` in a checkout of the project")
    out = args.out or Path("runs") / time.strftime("demo-%Y%m%d-%H%M%S")
    demo = next(iter(found)).load()
    print(summary_line(demo(out.resolve(), seed=args.seed, overrides=args.overrides, cache=cache_folder())))
    return 0


def _gateway(args: argparse.Namespace) -> int:
    if (args.engine == "scripted") != (args.script is not None):
        raise ConfigError("--script FILE.jsonl goes with --engine scripted, and neither without the other")
    given = {"model.path": args.model, "server.token": args.token, "server.port": args.port}
    flags = [f"{key}={json.dumps(value)}" for key, value in given.items() if value is not None]
    # An agent that nobody trains samples as it likes.
    config = load_config(None, ["rollout.sampling_policy=client", *flags, *args.overrides], Config)
    from molt.train.launch.gateway import Script, run_gateway

    run_gateway(config, script=Script(args.script, args.engine_log) if args.script else None)
    return 0


def _eval(args: argparse.Namespace) -> int:
    config = load_config(args.config, args.overrides, Config)
    from molt.train.launch.evaluation import run_evaluation
    from molt.train.observe.eval_table import format_evaluation

    row = run_evaluation(config, checkpoint=args.checkpoint, out=args.out)
    print(json.dumps(row) if args.json else f"{format_evaluation(row)}\n{row['folder']}")
    return 0


def _replay(args: argparse.Namespace) -> int:
    from molt.train.launch.replay import run_replay

    print(json.dumps(run_replay(args.run_dir, args.overrides, out=args.out, grades=args.grades)))
    return 0


def _regrade(args: argparse.Namespace) -> int:
    from molt.train.launch.regrade import run_regrade

    print(json.dumps(run_regrade(args.run_dir, agent=args.agent, name=args.name).as_dict()))
    return 0


def _status(args: argparse.Namespace) -> int:
    from molt.train.launch.status import run_status

    print(run_status(args.run_dir, as_json=args.json))
    return 0


def _audit(args: argparse.Namespace) -> int:
    from molt.train.audit import audit

    report = audit(args.run_dir)
    print(json.dumps(report.as_dict(), indent=2))
    return 0 if report.passed else 1


def _conformance(args: argparse.Namespace) -> int:
    from molt.train.conformance import format_table, run_conformance

    rows = list(run_conformance(client=args.harness, python=args.python.absolute()))
    print("\n".join(json.dumps(row.as_dict()) for row in rows) if args.json else format_table(rows))
    # A client that was asked for by name has to be there.
    passed = {"pass"} if args.harness else {"pass", "not installed"}
    return 0 if all(row.result in passed for row in rows) else 1


def summary_line(summary: dict[str, Any]) -> str:
    """A finished run in one line."""
    line = f"{summary['num_updates']} updates in {summary['seconds']:.0f} s"
    if summary["evaluations"]:
        first, last = summary["evaluations"][0], summary["evaluations"][-1]
        line += f", reward on held-out tasks {first['reward_mean']:.3f} -> {last['reward_mean']:.3f}"
    return f"{line}; {summary['folder']}"


if __name__ == "__main__":
    sys.exit(main())
