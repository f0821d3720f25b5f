"""How an attempt ends, by what its agent does."""

import asyncio
import threading
import time
from typing import Any

import httpx
import httpx2
import openai
import pytest

from molt.agents import AgentRunner, ChatAgent, ChatAgentRunner, Context, InfrastructureError, Result
from molt.agents.protocol import ResultReport
from molt.agents.rollout import run_lease
from molt.agents.testing import ScriptedModel, ScriptedReply


def runner_of(function: Any) -> AgentRunner:
    class Agent(ChatAgent):
        run = staticmethod(function)

    return ChatAgentRunner(Agent)


async def report_of(model: ScriptedModel, function: Any, *, timeout_s: float = 10.0, **row: Any) -> ResultReport:
    lease = model.lease(row or {"prompt": "2 + 2 ="}, timeout_s=timeout_s)
    return await run_lease(runner_of(function), lease, worker_id="w1")


async def test_a_result_completes(model: ScriptedModel):
    async def run(ctx: Context) -> Result:
        return Result(reward=0.5, score=1, info={"note": "x"})

    report = await report_of(model, run)
    assert report == ResultReport(
        worker_id="w1", attempt=1, outcome="completed", reward=0.5, score=1.0, info={"note": "x"}
    )


async def test_a_truncated_result_keeps_its_reward(model: ScriptedModel):
    report = await report_of(model, lambda ctx: Result(0.25, truncated=True))
    assert (report.outcome, report.reward) == ("truncated", 0.25)


@pytest.mark.parametrize("reward", [float("nan"), "1.0", True, None])
async def test_a_reward_that_is_no_finite_number_fails_with_the_reason(model: ScriptedModel, reward: Any):
    report = await report_of(model, lambda ctx: Result(reward))
    assert (report.outcome, report.reward) == ("failed", None)
    assert report.error is not None
    assert "reward is" in report.error


async def test_an_agent_that_raises_has_failed_and_the_line_is_named(model: ScriptedModel):
    class Runner(AgentRunner):
        async def run(self, ctx: Context) -> Result:
            raise KeyError("answer")

    report = await run_lease(Runner(), model.lease({}), worker_id="w1")
    line = Runner.run.__code__.co_firstlineno + 1
    assert (report.outcome, report.reward, report.score) == ("failed", None, None)
    assert report.error == f"KeyError: 'answer' ({__file__}:{line})"


async def test_a_malformed_task_row_fails_with_the_field(model: ScriptedModel):
    report = await report_of(model, lambda ctx: Result(1.0), prompt=7)
    assert report.outcome == "failed"
    assert report.error is not None
    assert "`prompt` is a int" in report.error


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (InfrastructureError("sandbox gone"), "infrastructure"),
        (ConnectionResetError("reset"), "infrastructure"),
        (httpx.ConnectError("refused"), "infrastructure"),
        (httpx2.ReadTimeout("silence"), "infrastructure"),
        (
            httpx.HTTPStatusError("busy", request=httpx.Request("GET", "http://x"), response=httpx.Response(503)),
            "infrastructure",
        ),
        (
            httpx.HTTPStatusError("gone", request=httpx.Request("GET", "http://x"), response=httpx.Response(404)),
            "failed",
        ),
        (ExceptionGroup("two", [ConnectionError(), InfrastructureError()]), "infrastructure"),
        (ExceptionGroup("two", [ConnectionError(), ValueError("mine")]), "failed"),
        (TimeoutError("the agent's own limit"), "failed"),
        (SystemExit(3), "failed"),
        (asyncio.CancelledError(), "failed"),
        (ValueError("a lone surrogate \ud800"), "failed"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else value,
)
async def test_who_is_to_blame(model: ScriptedModel, error: BaseException, outcome: str):
    async def run(ctx: Context) -> Result:
        raise error

    report = await report_of(model, run)
    assert report.outcome == outcome
    assert report.error
    report.error.encode()


async def test_an_error_raised_from_a_network_error_is_infrastructure(model: ScriptedModel):
    async def run(ctx: Context) -> Result:
        try:
            raise BrokenPipeError
        except BrokenPipeError as exc:
            raise ValueError("no answer from the sandbox") from exc

    assert (await report_of(model, run)).outcome == "infrastructure"


async def call_openai(ctx: Context) -> Result:
    async with openai.AsyncOpenAI(base_url=ctx.base_url, api_key=ctx.api_key, max_retries=0) as client:
        await client.chat.completions.create(model=ctx.model_name, messages=list(ctx.messages))
    return Result(1.0)


@pytest.mark.parametrize(("status", "outcome"), [(503, "infrastructure"), (429, "infrastructure"), (400, "failed")])
async def test_errors_of_the_openai_sdk_are_told_apart(status: int, outcome: str):
    async with ScriptedModel([ScriptedReply(status=status)]) as model:
        assert (await report_of(model, call_openai)).outcome == outcome


async def test_a_model_that_cannot_be_reached_is_infrastructure():
    async with ScriptedModel(["4"]) as model:
        lease = model.lease({"prompt": "hi"})
    report = await run_lease(runner_of(call_openai), lease, worker_id="w1")
    assert report.outcome == "infrastructure"


async def test_the_deadline_cuts_an_async_agent_which_may_clean_up(model: ScriptedModel):
    cleaned = False

    async def run(ctx: Context) -> Result:
        nonlocal cleaned
        assert ctx.deadline - time.time() < 0.06
        try:
            return await asyncio.get_running_loop().create_future()
        finally:
            cleaned = True

    report = await report_of(model, run, timeout_s=0.05)
    assert (report.outcome, report.reward, report.error) == ("timeout", None, "no Result within 0.05 s")
    assert cleaned


async def test_the_deadline_cuts_a_plain_agent(model: ScriptedModel):
    released = threading.Event()
    report = await report_of(model, lambda ctx: released.wait(), timeout_s=0.05)
    assert report.outcome == "timeout"
    released.set()


async def test_a_result_after_the_deadline_does_not_count(model: ScriptedModel):
    async def run(ctx: Context) -> Result:
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            return Result(1.0)  # noqa: B012 - it swallows the cancellation, on purpose

    assert (await report_of(model, run, timeout_s=0.05)).outcome == "timeout"


async def test_an_agent_that_ignores_its_cancellation_is_abandoned(
    model: ScriptedModel, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("molt.agents.rollout.CANCEL_GRACE_S", 0.05)
    released = asyncio.Event()

    async def run(ctx: Context) -> Result:
        while not released.is_set():
            try:
                await released.wait()
            except asyncio.CancelledError:
                continue
        return Result(1.0)

    assert (await report_of(model, run, timeout_s=0.05)).outcome == "timeout"
    released.set()


async def test_a_plain_agent_that_blocks_does_not_stall_others(model: ScriptedModel):
    other_has_run = threading.Event()

    def blocks(ctx: Context) -> Result:
        return Result(float(other_has_run.wait(10)))

    async def runs(ctx: Context) -> Result:
        other_has_run.set()
        return Result(1.0)

    reports = await asyncio.gather(report_of(model, blocks), report_of(model, runs))
    assert [report.reward for report in reports] == [1.0, 1.0]


async def test_each_rollout_gets_an_agent_of_its_own(model: ScriptedModel):
    class Counting(ChatAgent):
        num_runs = 0

        async def run(self, ctx: Context) -> Result:
            self.num_runs += 1
            return Result(self.num_runs)

    runner = ChatAgentRunner(Counting)
    reports = [await run_lease(runner, model.lease({}), worker_id="w1") for _ in range(3)]
    assert [report.reward for report in reports] == [1.0, 1.0, 1.0]


def test_a_runner_refuses_what_makes_no_agent():
    class NoRun(ChatAgent):
        pass

    with pytest.raises(TypeError, match="NoRun lacks run"):
        ChatAgentRunner(NoRun)  # type: ignore[type-abstract]
    with pytest.raises(TypeError, match="takes the agent class, not an object"):
        ChatAgentRunner(object())  # type: ignore[arg-type]
