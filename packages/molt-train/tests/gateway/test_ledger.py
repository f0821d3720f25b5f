"""Random clients that cut, resend and overlap: nothing that was sampled is lost, doubled or mixed up."""
# ruff: noqa: TID252 - the folders of tests are no installed package

import asyncio
import contextlib

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from .conftest import until
from .ledger_check import check_ledger
from .replies import CALCULATOR, call
from .sockets import RawClient

pytestmark = pytest.mark.asyncio(loop_scope="session")

LINES = st.lists(
    st.sampled_from(
        [
            {"text": "fine"},
            {"text": "fine", "delay_s": 0.003},
            {"text": "well then", "chunk_delay_s": 0.001},
            {"text": "<think>\nhm\n</think>\n\nso" + call('{"a": 1}'), "chunks": [3, 2]},
            {"text": "cut", "finish_reason": "length"},
            {"text": "half", "error": "overloaded"},
            {"error": "dead"},
            {"error": "overloaded"},
        ]
    ),
    min_size=1,
    max_size=5,
)
ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(["ask", "ask", "resend", "retry", "cut", "cut late", "both", "edit"]),
        st.booleans(),
        st.sampled_from([1, 1, 2]),
    ),
    min_size=1,
    max_size=6,
)


async def agent(caller, actions):
    messages = [{"role": "user", "content": "hi"}]
    for number, (action, stream, num_choices) in enumerate(actions):
        body = {"messages": messages, "tools": [CALCULATOR], "stream": stream, "n": num_choices}
        if action.startswith("cut"):
            client = await RawClient.post(caller, "/v1/chat/completions", body)
            if action == "cut late":
                with contextlib.suppress(asyncio.IncompleteReadError):
                    await client.read_until(b"\r\n\r\n")
            client.reset()
            continue
        if action == "both":
            both = [caller.post("/v1/chat/completions", body) for _ in range(2)]
            response = (await asyncio.gather(*both))[0]
        else:
            headers = {"x-stainless-retry-count": "1"} if action == "retry" else {}
            response = await caller.post("/v1/chat/completions", body, **headers)
        assert response.status_code in (200, 503)
        if action in ("ask", "edit") and response.status_code == 200 and not stream:
            reply = response.json()["choices"][0]["message"]
            results = [{"role": "tool", "tool_call_id": c["id"], "content": "3"} for c in reply.get("tool_calls", [])]
            more = {"role": "user", "content": f"more {number}"}
            messages = [*messages, reply, *results, more] if action == "ask" else [more, *messages[1:]]


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(LINES, st.lists(ACTIONS, min_size=1, max_size=3), st.sampled_from([0.0, 0.002, 60.0]))
async def test_every_engine_call_is_one_turn_and_every_turn_is_exact(bench, lines, agents, grace_s):
    start = len(bench.log)
    bench.serve(*lines, grace_s=grace_s, hold_s=0.0)
    callers = [bench.open() for _ in agents]
    await asyncio.gather(*(agent(caller, actions) for caller, actions in zip(callers, agents, strict=True)))
    await until(lambda: not any(caller.session.attempts._under_way for caller in callers))
    check_ledger([caller.session for caller in callers], bench.log[start:])
    for caller in callers:
        await bench.sessions.close(caller.session.session_id)
        counters = caller.session.counters
        assert counters["attempts.given_up"] + counters["replies_undelivered"] <= counters["clients_left"]
