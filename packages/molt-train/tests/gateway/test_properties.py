"""Random conversations on every wire, streamed or whole, cut and resent: the record is what the engine sampled."""
# ruff: noqa: TID252 - the folders of tests are no installed package

import asyncio
import contextlib
import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from .conftest import until
from .ledger_check import check_ledger
from .replies import call
from .sockets import RawClient
from .wire_agents import WIRES, Completions, Messages

pytestmark = pytest.mark.asyncio(loop_scope="session")

PIECES = st.sampled_from(
    [
        "hi",
        " ",
        "\n",
        "é",
        "😀",
        "ST",
        "STOP",
        "<|im_end|>",
        "<think>",
        "</think>",
        "<think>\nhm\n</think>\n\n",
        "<tool_call>",
        '<tool_call>\n{"name": "calculator", "arguments": {"a":',
        call('{"a":1,  "b": "gr\\u00fc\\u00df😀"}'),
        call("{}"),
        call('{"q": ["x"]}', "search"),
        call('{"a": 2', "search"),
    ]
)
LINES = st.lists(
    st.fixed_dictionaries(
        {
            "text": st.lists(PIECES, max_size=5).map("".join),
            "chunks": st.lists(st.integers(1, 6), max_size=5),
            "finish_reason": st.sampled_from(["stop", "stop", "stop", "length"]),
            "chunk_delay_s": st.sampled_from([0, 0, 0.0005]),
        }
    ),
    min_size=1,
    max_size=6,
)
CHOICES = ("auto", "auto", "auto", "none", "required", "calculator", "one at a time")
STEPS = st.lists(
    st.fixed_dictionaries(
        {
            "kind": st.sampled_from(
                ["go on", "go on", "go on", "fork", "edit", "cut", "cut in the stream", "cut late"]
            ),
            "word": st.sampled_from(["hi", "é😀", "<|im_end|>", "<tool_call>", " "]),
            "tools": st.sampled_from(["one", "one", "one", "two", "none"]),
            "choice": st.sampled_from(CHOICES),
            "stream": st.booleans(),
            "n": st.sampled_from([1, 1, 2]),
            "max_tokens": st.sampled_from([60, 60, 4]),
        }
    ),
    min_size=1,
    max_size=4,
)


async def converse(bench: Any, caller: Any, number: int, wire: Any, steps: list[dict[str, Any]]) -> None:
    """One agent's conversation. A reply that it has read is asked for again in the other mode: it reads the same."""
    history = wire.start(number, bench)
    begun = [history]
    for index, step in enumerate(steps):
        if step["kind"] == "fork":
            history = begun[index % len(begun)]
        elif step["kind"] == "edit":
            history = begun[0]
        asked = history + wire.said(f"{step['word']} {index}", bench)
        body = wire.body(asked, step)
        if step["kind"].startswith("cut"):
            await cut(caller, wire.path, body, step)
        response = await caller.post(wire.path, {**body, "stream": step["stream"]})
        assert response.status_code == 200, response.text
        again = await caller.post(wire.path, body | {"stream": False}, **{"x-stainless-retry-count": "1"})
        reply = again.json()
        shown = wire.folded(response.content) if step["stream"] else wire.whole(response.json())
        if shown["id"] == reply["id"]:
            check_same(wire, shown, reply, again.text)
        else:
            assert step["kind"].startswith("cut"), "a reply that was read is what a retry is given"
        if wire.path == Completions.path:
            turn = [turn for turn in caller.turns if turn.response_id == reply["id"]][-1]
            history = [*asked, *turn.token_ids]
        else:
            history = [*asked, *wire.echo(reply)]
        begun.append(history)


async def cut(caller: Any, path: str, body: dict[str, Any], step: dict[str, Any]) -> None:
    """Ask for it, and reset the connection: before, in, or behind the reply."""
    client = await RawClient.post(caller, path, body | {"stream": step["stream"]})
    with contextlib.suppress(asyncio.IncompleteReadError):
        if step["kind"] != "cut":
            await client.read_until(b"\r\n\r\n")
        if step["kind"] == "cut late" and step["stream"]:
            await client.read_until(b"\r\n0\r\n\r\n")
    client.reset()


def check_same(wire: Any, shown: dict[str, Any], reply: dict[str, Any], text: str) -> None:
    """What a stream adds up to is the whole reply of the same sample; a call's JSON is the same to the byte."""
    whole = wire.whole(reply)
    if wire.path == Messages.path:
        for streamed, block in zip(shown["content"], whole["content"], strict=True):
            if "json" in streamed:
                arguments = streamed.pop("json") or "{}"
                with contextlib.suppress(ValueError):  # a call that was cut shows as much as can be read
                    assert block["input"] == json.loads(arguments)
                    assert f'"input":{arguments}' in text
                streamed["input"] = block["input"]
    assert shown == whole


@settings(max_examples=45, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    LINES,
    st.lists(st.tuples(st.sampled_from(WIRES), STEPS), min_size=1, max_size=3),
    st.sampled_from([0.0, 0.002, 60.0]),
)
async def test_what_is_recorded_is_what_was_sampled_and_what_is_streamed_is_what_is_shown(
    bench, lines, conversations, grace_s
):
    start = len(bench.log)
    bench.serve(*lines, grace_s=grace_s)
    caller, other = bench.open(stop=("STOP",)), bench.open()
    await asyncio.gather(
        *(
            converse(bench, other if number == 2 else caller, number, wire, steps)
            for number, (wire, steps) in enumerate(conversations)
        )
    )
    await until(lambda: not any(one.session.attempts._under_way for one in (caller, other)))
    check_ledger([caller.session, other.session], bench.log[start:])
    if not any(step["kind"].startswith("cut") for _, steps in conversations for step in steps):
        for one in (caller, other):
            bench.check_exact(one)
            assert all(turn.status == "delivered" for turn in one.turns)
