"""Two hundred sessions at once, with everything that goes wrong in a day: the books balance afterwards."""
# ruff: noqa: TID252 - the folders of tests are no installed package; the faults are drawn, and seeded

import asyncio
import itertools
import json
import random
import re
from collections import Counter
from collections.abc import AsyncGenerator
from typing import Any

import msgspec
import pytest

from molt.train.engine.fake import ScriptedEngine, ScriptLine
from molt.train.engine.protocol import EngineChunk, EngineRequest

from .conftest import until
from .ledger_check import check_ledger
from .replies import CALCULATOR, CALCULATOR_BLOCK, call
from .sockets import RawClient

pytestmark = pytest.mark.asyncio(loop_scope="session")

SEED = 20
NUM_SESSIONS, NUM_TURNS, NUM_REFITS = 200, 5, 5
ROUTES = {"chat": "/v1/chat/completions", "messages": "/v1/messages", "responses": "/v1/responses"}
FAULTS = ("none",) * 8 + ("resend", "resend whole", "give up", "sibling", "side call", "rewrite", "cut at the end")
MARK = re.compile(r"\bS(\d+)S\b")


class RefittedEngine(ScriptedEngine):
    """The scripted engine with refits: it pauses, holds what it samples, and goes on under the next version."""

    version = 0
    serving: asyncio.Event

    async def generate(self, request: EngineRequest) -> EngineChunk:
        chunk = await super().generate(request)
        await self.serving.wait()
        return self._versioned(chunk)

    async def stream(self, request: EngineRequest) -> AsyncGenerator[EngineChunk]:
        async for chunk in super().stream(request):
            await self.serving.wait()
            yield self._versioned(chunk)

    def _versioned(self, chunk: EngineChunk) -> EngineChunk:
        return msgspec.structs.replace(chunk, versions=[self.version] * len(chunk.token_ids))

    async def refit(self) -> None:
        self.serving.clear()
        await asyncio.sleep(0.02)
        self.version += 1
        self.serving.set()


class Agent:
    """One rollout's agent: it talks, calls a tool, and is hit by faults."""

    def __init__(self, caller: Any, number: int) -> None:
        self.caller, self.number = caller, number
        self.random = random.Random(SEED * 10_000 + number)
        self.wire = self.random.choice(list(ROUTES))
        self.history: list[dict[str, Any]] = []

    async def run(self) -> None:
        for turn in range(NUM_TURNS):
            self.history.append({"role": "user", "content": f"S{self.number}S says {turn}"})
            fault = self.random.choice(FAULTS)
            if fault == "side call":
                await self.post([{"role": "user", "content": f"a title for S{self.number}S"}], tools=False)
            elif fault == "sibling":
                await asyncio.gather(self.post(self.history), self.post(self.history))
            elif fault == "rewrite":
                self.history = [{"role": "user", "content": f"summary of S{self.number}S at {turn}"}]
            elif fault != "none":
                await self.cut(fault)
                if fault == "give up":
                    continue
            if reply := await self.post(self.history, retried=fault == "cut at the end"):
                self.history += self.echo(reply)

    async def cut(self, fault: str) -> None:
        """Break off a request: while it is answered, or when the whole answer has arrived."""
        stream = fault != "resend whole"
        path, body = ROUTES[self.wire], self.body(self.history, tools=True) | ({"stream": True} if stream else {})
        client = await RawClient.post(self.caller, path, body)
        if stream:
            head = await client.read_until(b"\r\n\r\n")
            if fault == "cut at the end" and head.startswith(b"HTTP/1.1 200"):
                await client.read_until(b"\r\n0\r\n\r\n")
        else:
            await asyncio.sleep(self.random.random() * 0.01)
        client.reset()

    async def post(self, history: list[dict[str, Any]], *, tools: bool = True, retried: bool = False) -> Any:
        """A call that is tried again while the engine is overloaded or dead. Returns the reply."""
        body = self.body(history, tools=tools)
        for attempt in itertools.count(int(retried)):
            headers = {"x-stainless-retry-count": str(attempt)} if attempt else {}
            response = await self.caller.post(ROUTES[self.wire], body, **headers)
            if response.status_code == 200:
                return response.json()
            assert response.status_code in (500, 503, 529), response.text
            await asyncio.sleep(0.01)
        return None

    def body(self, history: list[dict[str, Any]], *, tools: bool) -> dict[str, Any]:
        system = f"S{self.number}S" if tools else "You write titles."
        if self.wire == "messages":
            body = {"system": system, "messages": history, "max_tokens": 60}
            return body | ({"tools": [CALCULATOR_BLOCK]} if tools else {})
        if self.wire == "chat":
            body = {"messages": [{"role": "system", "content": system}, *history], "max_tokens": 60}
            return body | ({"tools": [CALCULATOR]} if tools else {})
        body = {"instructions": system, "input": history, "max_output_tokens": 60}
        return body | ({"tools": [{"type": "function", **CALCULATOR["function"]}]} if tools else {})

    def echo(self, reply: dict[str, Any]) -> list[dict[str, Any]]:
        """What the agent appends: the reply, and the results of its tool calls."""
        result = f"result for S{self.number}S"
        if self.wire == "responses":
            calls = [item for item in reply["output"] if item["type"] == "function_call"]
            outputs = [{"type": "function_call_output", "call_id": item["call_id"], "output": result} for item in calls]
            return [*reply["output"], *outputs]
        if self.wire == "chat":
            message = reply["choices"][0]["message"]
            calls = message.get("tool_calls", [])
            return [message, *({"role": "tool", "tool_call_id": item["id"], "content": result} for item in calls)]
        content = reply["content"] or [{"type": "text", "text": ""}]
        uses = [block for block in content if block["type"] == "tool_use"]
        results = [{"type": "tool_result", "tool_use_id": block["id"], "content": result} for block in uses]
        return [{"role": "assistant", "content": content}, *([{"role": "user", "content": results}] if results else [])]


def script(draw: random.Random) -> list[ScriptLine]:
    """Replies of every kind, cut at random into chunks, with delays; some fail."""
    texts = [
        "fine",
        "<think>\nhm\n</think>\n\nso é😀 it is",
        "let me see " + call('{"a":1}'),
        call("{}") * 2,
        "<think>\nhm",
    ]
    lines = []
    for number in range(4000):
        line: dict[str, Any] = {"text": f"{draw.choice(texts)}", "logprob": -number / 1000}
        line["chunks"] = [draw.randint(1, 6) for _ in range(draw.randint(0, 5))]
        line["delay_s"] = draw.choice([0, 0, 0.002, 0.02])
        line["chunk_delay_s"] = draw.choice([0, 0, 0.001])
        line["finish_reason"] = draw.choice(["stop"] * 5 + ["length"])
        if draw.random() < 0.04:
            line["error"] = draw.choice(["dead", "overloaded"])
            line["text"] = draw.choice([line["text"], None])
        lines.append(ScriptLine(**line))
    return lines


@pytest.mark.timeout(60)
async def test_the_books_balance_after_a_run_full_of_faults(bench, model_path, tmp_path):
    engine = RefittedEngine(script(random.Random(SEED)), model_path, log_path=tmp_path / "faults.jsonl")
    engine.serving = asyncio.Event()
    engine.serving.set()
    bench.serve(engine=engine, grace_s=0.05, hold_s=5.0)
    callers = [bench.open() for _ in range(NUM_SESSIONS)]
    agents = [asyncio.ensure_future(Agent(caller, number).run()) for number, caller in enumerate(callers)]
    log = tmp_path / "faults.jsonl"
    for refit in range(1, NUM_REFITS + 1):
        due = refit * NUM_SESSIONS * NUM_TURNS // (NUM_REFITS + 1)
        await until(lambda due=due: len(log.read_bytes().splitlines()) >= due)
        await engine.refit()
    await asyncio.gather(*agents)
    await asyncio.gather(*(caller.session.close() for caller in callers))

    lines = [json.loads(line) for line in log.read_bytes().splitlines()]
    check_ledger([caller.session for caller in callers], lines)
    assert engine.version == NUM_REFITS
    for number, caller in enumerate(callers):
        for turn in caller.turns:
            seen = set(MARK.findall(bench.decode(turn.context_ids)))
            assert seen <= {str(number)}, "a token of another session"
            assert turn.versions == sorted(turn.versions)
    spans = {version for caller in callers for turn in caller.turns for version in turn.versions}
    assert spans >= set(range(NUM_REFITS + 1))
    counters = sum((Counter(caller.session.counters) for caller in callers), start=Counter())
    turns = [turn for caller in callers for turn in caller.turns]
    failed = sum(line["finish_reason"] == "error" for line in lines)
    assert counters["engine_failed"] == sum(turn.status == "failed" for turn in turns)
    assert counters["engine_failed"] <= failed <= counters["engine_failed"] + counters["engine_dead_held"]
    whole = [line for line in lines if line["finish_reason"] in ("stop", "length")]
    assert sum(len(line["token_ids"]) for line in whole) == sum(
        len(turn.token_ids) for turn in turns if turn.status in ("delivered", "undelivered")
    )
    assert min(counters["resends.replayed"], counters["clients_left"]) > 0
