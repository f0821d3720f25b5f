import errno
import os

import pytest

from molt.train.gateway import trace as trace_module
from molt.train.gateway.trace import Trace, left_traces, read_trace
from molt.train.gateway.turns import Frame, TurnNode, TurnTree, pack, pack_floats


def node(turn_id, parent=None, **fields):
    return TurnNode(
        **{
            "turn_id": turn_id,
            "wire": "chat",
            "parent": parent,
            "opened_by": None if parent else "start",
            "frame": Frame(1, b"tools", True),
            "request": 7,
            "response_id": f"chatcmpl-{turn_id}",
            "root_id": "a",
            "sampling": b'{"max_tokens":5}',
            "off_policy": ("top_k",),
            "client": b'{"user-agent":"me"}',
            "prompt_length": 2,
            "context_ids": pack([1, 2]),
            "token_ids": pack([3, 4, 5]),
            "logprobs": pack_floats([-0.1, -0.2, -1e-300]),
            "versions": pack([0, 0, 1]),
            "finish_reason": "stop",
            **fields,
        }
    )


def recorded(trace):
    """Two turns, the first delivered and continued, and the tree that holds the same."""
    first = node("a")
    trace.add(first)
    trace.mark("a", status="delivered", continued=True)
    second = node("b", first)
    trace.add(second)
    first.status, first.continued = "delivered", True
    tree = TurnTree()
    tree.nodes += [first, second]
    return tree


def test_a_trace_reads_back_as_the_tree_that_wrote_it(tmp_path):
    tree = recorded(Trace(tmp_path, "s1"))
    assert left_traces(tmp_path) == [tmp_path / "s1.trace"]
    assert read_trace(tmp_path / "s1.trace") == tree.turns("s1")


def test_a_torn_or_damaged_tail_loses_only_itself(tmp_path):
    tree = recorded(Trace(tmp_path, "s1"))
    path = tmp_path / "s1.trace"
    whole = path.read_bytes()
    first_turn = tree.turns("s1")[0]
    for cut in range(len(whole) - 1, len(whole) - 40, -7):
        path.write_bytes(whole[:cut])
        assert read_trace(path) == [first_turn]
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    assert read_trace(path) == [first_turn]


def test_a_full_disk_leaves_the_trace_as_it_was(tmp_path, monkeypatch):
    trace = Trace(tmp_path, "s1")
    recorded(trace)
    path = tmp_path / "s1.trace"
    whole = path.read_bytes()

    def short(file, data):
        return real_write(file, data[: len(data) // 2])

    real_write = os.write
    monkeypatch.setattr(trace_module.os, "write", short)
    with pytest.raises(OSError, match="disk is full"):
        trace.add(node("c"))
    assert path.read_bytes() == whole

    def full(file, data):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(trace_module.os, "write", full)
    with pytest.raises(OSError, match="No space"):
        trace.mark("a", status="delivered", continued=False)
    monkeypatch.undo()
    trace.add(node("c"))
    assert len(read_trace(path)) == 3


def test_a_discarded_trace_is_gone(tmp_path):
    trace = Trace(tmp_path, "s1")
    trace.discard()
    recorded(trace)
    trace.discard()
    assert left_traces(tmp_path) == []


@pytest.mark.asyncio(loop_scope="session")
async def test_a_turn_is_in_the_file_before_its_client_has_the_reply(bench, tmp_path):
    bench.serve({"text": "one"}, {"text": "two"}, traces=tmp_path)
    caller = bench.open()
    path = tmp_path / f"{caller.session.session_id}.trace"
    messages = [{"role": "user", "content": "hi"}]
    first = await caller.openai.chat.completions.create(model="m", messages=messages)
    assert read_trace(path) == caller.turns
    messages += [first.choices[0].message.model_dump(exclude_none=True), {"role": "user", "content": "and"}]
    async for _ in await caller.openai.chat.completions.create(model="m", messages=messages, stream=True):
        assert len(read_trace(path)) >= 1
    assert read_trace(path) == caller.turns
    assert [turn.status for turn in caller.turns] == ["delivered", "delivered"]


@pytest.mark.asyncio(loop_scope="session")
async def test_a_reply_that_cannot_be_kept_is_not_given_out(bench, tmp_path, monkeypatch):
    bench.serve({"text": "one"}, {"text": "two"}, traces=tmp_path)
    caller = bench.open()
    body = {"messages": [{"role": "user", "content": "hi"}]}

    def full(file, data):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(trace_module.os, "write", full)
        refused = await caller.post("/v1/chat/completions", body)
    assert refused.status_code == 503
    assert "No space left on device" in refused.json()["error"]["message"]
    answered = await caller.post("/v1/chat/completions", body, **{"x-stainless-retry-count": "1"})
    assert answered.json()["choices"][0]["message"]["content"] == "two"
    assert [turn.status for turn in caller.turns] == ["failed", "delivered"]
    assert caller.session.counters["turns_unkept"] == 1
    assert [turn.status for turn in read_trace(tmp_path / f"{caller.session.session_id}.trace")] == ["delivered"]
