"""Answers and their graders."""

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest

from molt.agents import ChatAgent, ChatAgentRunner, Env, InfrastructureError, NoGraderError, Result, StepEnvRunner
from molt.agents.load import load_runner
from molt.agents.protocol import ResultReport
from molt.agents.rollout import grade_again, run_lease
from molt.agents.testing import ScriptedLeases, ScriptedModel
from molt.agents.worker import Worker

ROW = {"prompt": "2 + 2 =", "label": "4"}


def agent_of(run: Callable[..., Any], grade: Callable[..., Any]) -> ChatAgentRunner:
    return ChatAgentRunner(type("Agent", (ChatAgent,), {"run": run, "grade": grade}))


async def report_of(runner: Any, model: ScriptedModel, **lease: Any) -> ResultReport:
    return await run_lease(runner, model.lease(ROW, **lease), worker_id="w")


def answers(value: Any) -> Callable[..., Any]:
    async def run(self: Any, ctx: Any) -> Any:
        return value

    return run


async def test_an_answer_is_graded_and_travels_with_the_report(model: ScriptedModel):
    async def grade(self: Any, ctx: Any, answer: Any) -> float:
        return float(answer["text"] == ctx.label)

    report = await report_of(agent_of(answers({"text": "4"}), grade), model)
    assert (report.outcome, report.reward, report.answer) == ("completed", 1.0, {"text": "4"})


async def test_a_grader_may_say_more_than_a_number(model: ScriptedModel):
    def grade(self: Any, ctx: Any, answer: Any) -> Result:
        return Result(0.5, truncated=True, score=2.0, info={"length": len(answer)})

    report = await report_of(agent_of(answers("four"), grade), model)
    assert (report.outcome, report.reward, report.score, report.info) == ("truncated", 0.5, 2.0, {"length": 4})


async def test_a_result_is_taken_as_it_is(model: ScriptedModel):
    def grade(self: Any, ctx: Any, answer: Any) -> float:
        raise AssertionError("not asked")

    report = await report_of(agent_of(answers(Result(0.25)), grade), model)
    assert (report.outcome, report.reward, report.answer) == ("completed", 0.25, None)


async def test_the_grader_sees_what_is_kept(model: ScriptedModel):
    seen: list[Any] = []

    def grade(self: Any, ctx: Any, answer: Any) -> int:
        seen.append((self, answer))
        return 1

    runner = agent_of(answers({"pair": (1, 2), 3: 4}), grade)
    report = await report_of(runner, model)
    again = await grade_again(runner, model.lease(ROW), report.answer, worker_id="w")
    assert report.answer == {"pair": [1, 2], "3": 4}
    assert [answer for _, answer in seen] == [report.answer] * 2
    assert seen[0][0] is not seen[1][0]
    assert (again.reward, again.answer) == (1.0, report.answer)


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (None, "the agent returned None: return a molt.agents.Result, or the answer that it grades"),
        (object(), "the answer cannot be written as JSON: it holds a object"),
        ("x" * (4 << 20), "the answer takes 4194306 bytes as JSON: keep it under 4194304"),
    ],
)
async def test_what_is_no_answer_fails_the_attempt(model: ScriptedModel, answer: Any, error: str):
    report = await report_of(agent_of(answers(answer), lambda self, ctx, answer: 1.0), model)
    assert (report.outcome, report.answer) == ("failed", None)
    assert error in (report.error or "")


@pytest.mark.parametrize("grade", [None, True, "1.0", float("nan"), Result(float("inf"))])
async def test_what_is_no_grade_fails_the_attempt_and_keeps_the_answer(model: ScriptedModel, grade: Any):
    report = await report_of(agent_of(answers("4"), lambda self, ctx, answer: grade), model)
    assert (report.outcome, report.reward, report.answer) == ("failed", None, "4")


async def test_a_grader_that_breaks_keeps_the_answer(model: ScriptedModel):
    def grade(self: Any, ctx: Any, answer: Any) -> float:
        raise InfrastructureError("the sandbox is gone")

    report = await report_of(agent_of(answers("4"), grade), model)
    assert (report.outcome, report.answer) == ("infrastructure", "4")


async def test_a_grader_that_is_too_slow_keeps_the_answer(model: ScriptedModel):
    let_go = threading.Event()

    def grade(self: Any, ctx: Any, answer: Any) -> float:
        let_go.wait(30)
        return 1.0

    report = await report_of(agent_of(answers("4"), grade), model, timeout_s=0.05)
    let_go.set()
    assert (report.outcome, report.answer) == ("timeout", "4")


async def test_an_agent_without_a_grader_must_return_a_result(model: ScriptedModel):
    runner = ChatAgentRunner(type("Agent", (ChatAgent,), {"run": answers("4")}))
    report = await report_of(runner, model)
    assert report.outcome == "failed"
    assert "return a molt.agents.Result" in (report.error or "")
    with pytest.raises(
        NoGraderError,
        match=r"molt\.agents\.chat exports no grade: define `grade\(self, ctx, answer\)` in its ChatAgent",
    ):
        await grade_again(runner, model.lease(ROW), "4", worker_id="w")


async def test_no_grader_is_named_by_the_file_of_its_agent(tmp_path, model: ScriptedModel):
    path = tmp_path / "agent.py"
    path.write_text(
        "from molt.agents import ChatAgent, ChatAgentRunner, Result\n"
        "class Mine(ChatAgent):\n    def run(self, ctx): return Result(1.0)\n"
        "class AgentRunner(ChatAgentRunner):\n    def __init__(self): super().__init__(Mine)\n"
    )
    runner = load_runner(str(path))
    with pytest.raises(NoGraderError) as caught:
        await runner.grade(None, "4")  # type: ignore[arg-type]
    assert str(caught.value) == f"{path} exports no grade: define `grade(self, ctx, answer)` in its ChatAgent"


async def test_environments_grade_step_by_step(model: ScriptedModel):
    class Mine(Env):
        def step(self, state: Any) -> Any:
            return "an answer"

    report = await report_of(StepEnvRunner(Mine), model)
    assert report.outcome == "failed"
    assert "return a molt.agents.Result" in (report.error or "")
    assert not StepEnvRunner(Mine).grades


class Mixed:
    """Rollouts that take turns, and one whose plain `run` or `grade` blocks until the others have made theirs."""

    def __init__(self, blocks: str) -> None:
        self.blocks = blocks
        self.in_block, self.let_go = threading.Event(), threading.Event()
        self.num_turns = 0

    def runner(self) -> ChatAgentRunner:
        return agent_of(lambda agent, ctx: self.run(ctx), lambda agent, ctx, answer: self.grade(answer))

    def run(self, ctx: Any) -> Any:
        if not ctx.data["blocks"]:
            assert self.in_block.wait(30)
            return self.take_turns()
        self.block("run")
        return "slow"

    async def take_turns(self) -> str:
        for _ in range(10):
            await asyncio.sleep(0)
            self.num_turns += 1
        if self.num_turns == 30:
            self.let_go.set()
        return "quick"

    def grade(self, answer: str) -> float:
        if answer == "slow":
            self.block("grade")
        return 1.0

    def block(self, where: str) -> None:
        if where == self.blocks:
            self.in_block.set()
            assert self.let_go.wait(30)


@pytest.mark.parametrize("blocks", ["run", "grade"])
async def test_rollouts_go_on_while_a_plain_method_blocks(model: ScriptedModel, blocks: str):
    rows = [{"blocks": i == 0} for i in range(4)]
    async with ScriptedLeases(rows, session=model.session()) as leases:
        await Worker(Mixed(blocks).runner(), leases.api(), concurrency=4, drain_s=1.0).run()
    assert [(r.report.outcome, r.report.reward) for r in leases.results] == [("completed", 1.0)] * 4
    assert sorted(r.report.answer for r in leases.results) == ["quick", "quick", "quick", "slow"]
