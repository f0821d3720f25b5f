"""`molt-agent try`, and the arguments of both commands."""

import asyncio
import functools
import os
import signal
import sys
from asyncio.subprocess import PIPE
from pathlib import Path

import msgspec
import pytest

from molt.agents.cli import main
from molt.agents.testing import ScriptedModel, ScriptedReply

AGENT = str(Path(__file__).parent / "agents" / "plain_agent.py")


def write_tasks(path: Path) -> str:
    rows = [{"prompt": "a", "label": "a"}, {"prompt": "crash", "label": ""}, {"prompt": "b", "label": "c"}]
    path.write_bytes(b"\n".join(msgspec.json.encode(row) for row in rows))
    return str(path)


async def try_agent(model: ScriptedModel, *options: str, stdout: int = PIPE) -> tuple[int, list[dict], str]:
    endpoint = ["--base-url", model.base_url, "--api-key", "K", "--model", "some-model"]
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "molt.agents", "try", AGENT, *endpoint, *options),
        stdout=stdout,
        stderr=PIPE,
    )
    printed, stderr = await process.communicate()
    assert process.returncode is not None
    return process.returncode, [msgspec.json.decode(line) for line in (printed or b"").splitlines()], stderr.decode()


async def test_try_prints_a_line_a_task_and_a_summary(tmp_path: Path):
    async with ScriptedModel(lambda body: body["messages"][-1]["content"]) as model:
        code, lines, stderr = await try_agent(model, "--tasks", write_tasks(tmp_path / "tasks.jsonl"))
    assert code == 0, stderr
    *tasks, summary = lines
    good, crashed, bad = sorted(tasks, key=lambda line: line["task"])
    assert good == {"task": 0, "outcome": "completed", "reward": 1.0, "error": None}
    assert bad == {"task": 2, "outcome": "completed", "reward": 0.0, "error": None}
    assert (crashed["outcome"], crashed["reward"]) == ("failed", None)
    assert crashed["error"].startswith("ValueError: as asked (")
    assert "plain_agent.py" in crashed["error"]
    assert summary == {"summary": {"mean_reward": 0.5, "num_tasks": 3, "outcomes": {"completed": 2, "failed": 1}}}
    assert "Traceback" in stderr  # who tries an agent wants to see where it failed
    assert {request.body["model"] for request in model.requests} == {"some-model"}
    assert {request.headers["authorization"] for request in model.requests} == {"Bearer K"}


async def test_try_without_any_reward_has_failed(tmp_path: Path):
    async with ScriptedModel(["crash"]) as model:
        code, lines, _ = await try_agent(model, "--tasks", write_tasks(tmp_path / "tasks.jsonl"), "--limit", "2")
    assert code == 1
    assert lines[-1] == {"summary": {"mean_reward": None, "num_tasks": 2, "outcomes": {"failed": 2}}}


async def test_try_ends_quietly_when_nobody_reads_its_output(tmp_path: Path):
    read_end, write_end = os.pipe()
    os.close(read_end)
    async with ScriptedModel(["a"]) as model:
        code, _, stderr = await try_agent(
            model, "--tasks", write_tasks(tmp_path / "tasks.jsonl"), "--limit", "1", stdout=write_end
        )
    os.close(write_end)
    assert (code, stderr) == (1, "")


async def test_try_can_be_interrupted(tmp_path: Path):
    asked = asyncio.Event()

    def never(body: object) -> ScriptedReply:
        asked.set()
        return ScriptedReply(wait_for=asyncio.Event())

    async with ScriptedModel(never) as model:
        endpoint = ["--base-url", model.base_url, "--api-key", "K", "--model", "m"]
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "molt.agents", "try", AGENT, *endpoint),
            *("--tasks", write_tasks(tmp_path / "tasks.jsonl")),
            stderr=PIPE,
            # A shell starts what runs in the background with SIGINT ignored, and children inherit that.
            preexec_fn=functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
        )
        await asked.wait()
        process.send_signal(signal.SIGINT)
        _, stderr = await process.communicate()
    assert process.returncode == 1
    assert stderr.decode().splitlines()[-1] == "molt-agent: interrupted"
    assert "Traceback" not in stderr.decode()


WORK = ["work", AGENT, "--server", "http://127.0.0.1:9", "--token", "T"]
TRY = ["try", AGENT, "--base-url", "http://127.0.0.1:9/v1", "--api-key", "K", "--model", "M"]


@pytest.mark.parametrize(
    ("argv", "reason"),
    [
        ([], "the following arguments are required: {work,try}"),
        (["work", AGENT, "--token", "T"], "the following arguments are required: --server"),
        ([*WORK, "--server", "localhost:8000"], "argument --server: 'localhost:8000': use http://HOST:PORT"),
        ([*WORK, "--concurrency", "0"], "argument --concurrency: '0': use a whole number, 1 or more"),
        ([*WORK, "--drain-s", "-1"], "argument --drain-s: '-1': use a number, 0 or more"),
        ([*WORK, "--server-timeout", "soon"], "argument --server-timeout: 'soon': use a number, 0 or more"),
        ([*WORK, "--label", "gpu"], "argument --label: 'gpu': use NAME=VALUE, such as arch=arm64"),
        ([*WORK, "--label", "=a100"], "argument --label: '=a100': use NAME=VALUE"),
        ([*WORK, "--label", "a=1", "--label", "a=2"], "--label a: it is '1' and '2': give each name one value"),
        (["work", "none.py", *WORK[2:]], "none.py: no such file"),
        (["work", "no_such_module", *WORK[2:]], "no_such_module: no such module"),
        (WORK[:4], "no token: pass --token, or set MOLT_TOKEN"),
        ([*TRY, "--tasks", "none.jsonl"], "none.jsonl: No such file"),
        ([*TRY, "--tasks", __file__], "test_cli.py, line 1: not a JSON object"),
        ([*TRY, "--tasks", "x", "--base-url", "http://127.0.0.1:9"], "it ends in /v1"),
        ([*TRY, "--tasks", "x", "--temperature", "nan"], "argument --temperature: 'nan': use a number, 0 or more"),
    ],
)
def test_bad_input_gives_one_line_and_exit_code_2(
    argv: list[str], reason: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.delenv("MOLT_TOKEN", raising=False)
    try:
        code = main(argv)
    except SystemExit as exc:  # from argparse
        code = exc.code
    stderr = capsys.readouterr().err
    assert code == 2
    assert stderr.startswith("molt-agent: error: ")
    assert reason in stderr
    assert stderr.count("\n") == 1


def test_the_token_can_come_from_the_environment(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("MOLT_TOKEN", "T")
    argv = [*WORK[:4], "--server-timeout", "0"]
    assert main(argv) == 1
    assert "no usable answer for 0 s: http://127.0.0.1:9/api/v1/leases: ConnectError" in capsys.readouterr().err


def test_the_options_are_pinned(capsys: pytest.CaptureFixture[str]):
    options: list[str] = []
    for command in ("work", "try"):
        with pytest.raises(SystemExit):
            main([command, "--help"])
        options += {word.strip("[],") for word in capsys.readouterr().out.split() if word.startswith(("--", "[--"))}
    expected = """--server --token --concurrency --label --drain-s --server-timeout --exit-with-parent
        --tasks --base-url --api-key --model --concurrency --limit --max-tokens --temperature"""
    assert sorted(options) == sorted([*expected.split(), "--help", "--help"])
