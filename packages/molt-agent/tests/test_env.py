"""Episodes of environments."""

import asyncio
import threading
from typing import Any

import pytest

from molt.agents import Env, Result, SamplingParams, StepEnvRunner, StepState
from molt.agents.protocol import ResultReport
from molt.agents.rollout import run_lease
from molt.agents.testing import ScriptedModel, ScriptedReply, ToolCall


async def report_of(
    env: Any, model: ScriptedModel, *, timeout_s: float = 10.0, max_turns: int = 32, **row: Any
) -> ResultReport:
    runner = StepEnvRunner(env, max_turns=max_turns)
    try:
        return await run_lease(runner, model.lease(row, timeout_s=timeout_s), worker_id="w1")
    finally:
        await runner.close()


class OneStep(Env):
    async def step(self, state):
        return Result(float(state["action_text"] == state["label"]))


async def test_one_step_is_one_model_call(model: ScriptedModel):
    tools = [{"type": "function", "function": {"name": "add"}}]
    report = await report_of(OneStep, model, prompt="2 + 2 =", label="4", tools=tools)
    assert (report.outcome, report.reward) == ("completed", 1.0)
    (request,) = model.requests
    assert request.body == {
        "model": "scripted",
        "messages": [{"role": "user", "content": "2 + 2 ="}],
        "max_tokens": 1024,
        "temperature": 1.0,
        "top_p": 1.0,
        "tools": tools,
    }
    assert request.headers["authorization"] == f"Bearer {model.session().api_key}"


class Guess(Env):
    """Three guesses; observations say higher."""

    def __init__(self):
        self.states: list[StepState] = []
        self.closed = False
        Guess.last = self

    async def reset(self, task):
        return f"Guess a number up to {task['limit']}."

    async def step(self, state):
        self.states.append(state)
        if state["turn"] == 2:
            return Result(1.0, info={"b": 2}, score=0.75)
        return Result(0.25, terminated=False, observation="Higher.", info={"a": 1, "b": 1})

    async def close(self):
        self.closed = True


async def test_an_episode_alternates_replies_and_observations():
    async with ScriptedModel(["3", "5", "7"]) as model:
        report = await report_of(Guess, model, messages=[{"role": "system", "content": "Play."}], limit=9, label=7)
    assert report.outcome == "completed"
    assert report.reward == 0.25 + 0.25 + 1.0
    assert report.score == 0.75
    assert report.info == {"a": 1, "b": 2}
    assert model.requests[2].body["messages"] == [
        {"role": "system", "content": "Play."},
        {"role": "user", "content": "Guess a number up to 9."},
        {"role": "assistant", "content": "3"},
        {"role": "user", "content": "Higher."},
        {"role": "assistant", "content": "5"},
        {"role": "user", "content": "Higher."},
    ]
    first, _, last = Guess.last.states
    assert (first["action_text"], first["observation_text"], first["turn"]) == ("3", "Guess a number up to 9.", 0)
    assert first["messages"][-1] == {"role": "assistant", "content": "3"}  # a state does not change afterwards
    assert (last["action_text"], last["observation_text"], last["turn"]) == ("7", "Higher.", 2)
    assert (last["label"], last["data"]["limit"], last["finish_reason"]) == (7, 9, "stop")
    assert last["messages"][-1] == {"role": "assistant", "content": "7"}
    assert Guess.last.closed


async def test_an_episode_is_truncated_after_max_turns(model: ScriptedModel):
    report = await report_of(Guess, model, max_turns=2, limit=9)
    assert (report.outcome, report.reward) == ("truncated", 0.5)
    assert len(model.requests) == 2


async def test_a_step_can_truncate_the_episode(model: ScriptedModel):
    class Cuts(Env):
        def step(self, state):
            return Result(0.5, terminated=False, truncated=True)

    report = await report_of(Cuts, model, prompt="hi")
    assert (report.outcome, report.reward) == ("truncated", 0.5)


async def test_an_episode_whose_context_is_full_is_truncated_with_what_it_earned():
    full = ScriptedReply(status=400, code="context_length_exceeded", text="too long")
    async with ScriptedModel(["3", full]) as model:
        report = await report_of(Guess, model, limit=9)
        assert (report.outcome, report.reward) == ("truncated", 0.25)
    async with ScriptedModel([full]) as model:
        report = await report_of(Guess, model, limit=9)
        assert report.outcome == "failed"
        assert report.error is not None
        assert "too long" in report.error


async def test_sampling_can_change_for_the_next_turn_only():
    class Cools(Env):
        def step(self, state):
            if state["turn"] == 2:
                return Result(1.0)
            params = SamplingParams(max_tokens=5, temperature=0.0, stop=("\n",)) if state["turn"] == 0 else None
            return Result(0.0, terminated=False, observation="go on", sampling_params=params)

    async with ScriptedModel(["a"]) as model:
        await report_of(Cools, model, prompt="hi")
    sampled = [(r.body["max_tokens"], r.body["temperature"], r.body.get("stop")) for r in model.requests]
    assert sampled == [(1024, 1.0, None), (5, 0.0, ["\n"]), (1024, 1.0, None)]


async def test_an_env_with_tools_answers_calls_with_messages():
    class Tools(Env):
        def step(self, state):
            calls = state["messages"][-1].get("tool_calls")
            if not calls:
                return Result(float(state["action_text"] == "4"))
            answer = {"role": "tool", "tool_call_id": calls[0]["id"], "content": "4"}
            return Result(0.0, terminated=False, observation=[answer])

    async with ScriptedModel([ScriptedReply(tool_calls=(ToolCall("add", {"terms": [2, 2]}),)), "4"]) as model:
        report = await report_of(Tools, model, prompt="2 + 2 =")
    assert (report.outcome, report.reward) == ("completed", 1.0)
    reply, answer = model.requests[1].body["messages"][1:]
    assert set(reply) == {"role", "tool_calls"}  # nulls of the reply are not sent back
    assert answer == {"role": "tool", "tool_call_id": "call_0", "content": "4"}


async def test_images_of_an_observation_are_sent_with_it():
    class Shows(Env):
        def step(self, state):
            return Result(
                1.0, terminated=state["turn"] == 1, observation="Look.", images=["data:image/png;base64,AA=="]
            )

    async with ScriptedModel(["a"]) as model:
        await report_of(Shows, model, prompt="hi")
    assert model.requests[1].body["messages"][-1]["content"] == [
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}},
        {"type": "text", "text": "Look."},
    ]


@pytest.mark.parametrize(
    ("result", "reason"),
    [
        (Result(0.0, terminated=False), "step 0 returned terminated=False without an observation"),
        (Result(float("nan")), "step 0: reward is nan"),
        (0.5, "step 0: the agent returned a float"),
        (Result(0.0, terminated=False, observation={"role": "user"}), "use text, or a list of chat messages"),  # type: ignore[arg-type]
        (Result(0.0, terminated=False, observation=[{"role": "user"}], images=["x"]), "images go with"),
    ],
)
async def test_a_step_that_cannot_be_followed_fails_with_the_reason(model: ScriptedModel, result: Any, reason: str):
    class Bad(Env):
        def step(self, state):
            return result

    report = await report_of(Bad, model, prompt="hi")
    assert report.outcome == "failed"
    assert report.error is not None
    assert reason in report.error


async def test_an_episode_without_anything_to_ask_fails(model: ScriptedModel):
    report = await report_of(OneStep, model, label="4")
    assert report.outcome == "failed"
    assert report.error is not None
    assert "no messages or prompt" in report.error


async def test_a_model_that_stays_away_is_infrastructure(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("molt.agents.completions.OUTAGE_LIMIT_S", 0.0)
    async with ScriptedModel([ScriptedReply(status=503)]) as model:
        report = await report_of(OneStep, model, prompt="hi")
    assert report.outcome == "infrastructure"


class Closes(Env):
    """Records that it was closed; what its step does is set from outside."""

    closed: threading.Event
    does: Any

    def step(self, state):
        return self.does()

    def close(self):
        self.closed.set()


async def test_close_is_called_after_an_error_and_at_the_deadline():
    stuck = ScriptedReply(wait_for=asyncio.Event())
    for script, outcome in ((["a"], "failed"), ([stuck], "timeout")):
        Closes.closed, Closes.does = threading.Event(), lambda _: 1 / 0
        async with ScriptedModel(script) as model:
            report = await report_of(Closes, model, timeout_s=0.1 if outcome == "timeout" else 10.0, prompt="hi")
        assert report.outcome == outcome
        assert Closes.closed.is_set()


async def test_a_close_that_fails_or_hangs_does_not_change_the_outcome(
    model: ScriptedModel, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr("molt.agents.episode.CLOSE_LIMIT_S", 0.05)

    class Fails(OneStep):
        async def close(self):
            raise OSError("already gone")

    class Hangs(OneStep):
        async def close(self):
            await asyncio.get_running_loop().create_future()

    for env in (Fails, Hangs):
        report = await report_of(env, model, prompt="2 + 2 =", label="4")
        assert (report.outcome, report.reward) == ("completed", 1.0)
    assert "Fails.close failed: OSError('already gone')" in caplog.text
    assert "Hangs.close took longer than 0.05 s" in caplog.text


def test_the_runner_refuses_what_makes_no_environment():
    with pytest.raises(ValueError, match="max_turns is 0"):
        StepEnvRunner(OneStep, max_turns=0)
    with pytest.raises(TypeError, match="Env lacks step"):
        StepEnvRunner(Env)  # type: ignore[type-abstract]
