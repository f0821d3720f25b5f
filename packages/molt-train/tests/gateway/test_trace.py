# ruff: noqa: TID252 - the folders of tests are no installed package

import errno
import os

import pytest

from molt.train.gateway import trace as trace_module
from molt.train.gateway.trace import TraceLog, delete_traces, read_traces
from molt.train.gateway.turns import Frame, TurnNode, TurnTree, pack, pack_floats

from .conftest import until


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


async def test_what_became_of_a_turn_is_kept_soon(log, tmp_path, monkeypatch):
    monkeypatch.setattr(trace_module, "MARK_S", 0.0)
    trace = log.of("s1")
    trace.add(node("a"))
    trace.mark("a", status="delivered", continued=False)
    assert [turn.status for turn in read_traces(tmp_path)["s1"]] == ["undelivered"]
    await until(lambda: [turn.status for turn in read_traces(tmp_path)["s1"]] == ["delivered"])


@pytest.fixture
def log(tmp_path):
    log = TraceLog(tmp_path)
    yield log
    log.close()


async def test_a_log_reads_back_as_the_trees_that_wrote_it(log, tmp_path):
    trees = {session_id: recorded(log.of(session_id)) for session_id in ("s1", "s2")}
    log.close()
    assert read_traces(tmp_path) == {session_id: tree.turns(session_id) for session_id, tree in trees.items()}


async def test_a_torn_or_damaged_tail_loses_only_itself(log, tmp_path):
    first_turn = recorded(log.of("s1")).turns("s1")[0]
    (path,) = tmp_path.iterdir()
    whole = path.read_bytes()
    for cut in range(len(whole) - 1, len(whole) - 40, -7):
        path.write_bytes(whole[:cut])
        assert read_traces(tmp_path) == {"s1": [first_turn]}
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    assert read_traces(tmp_path) == {"s1": [first_turn]}


async def test_a_full_disk_leaves_the_log_as_it_was(log, tmp_path, monkeypatch):
    trace = log.of("s1")
    recorded(trace)
    (path,) = tmp_path.iterdir()
    whole = path.read_bytes()

    def short(file, data):
        return real_write(file, data[: len(data) // 2])

    real_write = os.write
    monkeypatch.setattr(trace_module.os, "write", short)
    with pytest.raises(OSError, match="disk is full"):
        trace.add(node("c"))
    assert path.read_bytes() == whole

    monkeypatch.setattr(trace_module.os, "write", full)
    trace.mark("b", status="delivered", continued=False)
    with pytest.raises(OSError, match="No space"):
        trace.add(node("c"))
    monkeypatch.undo()
    trace.add(node("c"))
    assert [turn.status for turn in read_traces(tmp_path)["s1"]] == ["delivered", "delivered", "undelivered"]


async def test_a_segment_stays_while_a_session_in_it_is_open(log, tmp_path, monkeypatch):
    monkeypatch.setattr(trace_module, "SEGMENT_BYTES", 1)
    traces = {session_id: log.of(session_id) for session_id in ("s1", "s2", "s3")}
    for session_id, turn_id in [("s1", "a"), ("s2", "b"), ("s1", "c"), ("s3", "d")]:
        traces[session_id].add(node(turn_id))
    assert len(list(tmp_path.iterdir())) == 4
    traces["s1"].discard()
    assert set(read_traces(tmp_path)) == {"s2", "s3"}
    traces["s3"].discard()
    assert set(read_traces(tmp_path)) == {"s2"}
    traces["s2"].discard()
    assert read_traces(tmp_path) == {}
    traces["s2"].add(node("e"))
    assert set(read_traces(tmp_path)) == {"s2"}
    log.close()
    assert len(list(tmp_path.iterdir())) == 1
    delete_traces(tmp_path)
    assert list(tmp_path.iterdir()) == []


def full(file, data):
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.asyncio(loop_scope="session")
async def test_a_turn_is_in_the_file_before_its_client_has_the_reply(bench, log, tmp_path):
    bench.serve({"text": "one"}, {"text": "two"}, traces=log)
    caller = bench.open()

    def kept():
        return read_traces(tmp_path)[caller.session.session_id]

    messages = [{"role": "user", "content": "hi"}]
    first = await caller.openai.chat.completions.create(model="m", messages=messages)
    assert [turn.token_ids for turn in kept()] == [turn.token_ids for turn in caller.turns]
    messages += [first.choices[0].message.model_dump(exclude_none=True), {"role": "user", "content": "and"}]
    async for _ in await caller.openai.chat.completions.create(model="m", messages=messages, stream=True):
        assert len(kept()) >= 1
    await until(lambda: kept() == caller.turns)
    assert [turn.status for turn in caller.turns] == ["delivered", "delivered"]


@pytest.mark.asyncio(loop_scope="session")
async def test_a_reply_that_cannot_be_kept_is_not_given_out(bench, log, tmp_path, monkeypatch):
    bench.serve({"text": "one"}, {"text": "two"}, traces=log)
    caller = bench.open()
    body = {"messages": [{"role": "user", "content": "hi"}]}

    with monkeypatch.context() as patched:
        patched.setattr(trace_module.os, "write", full)
        refused = await caller.post("/v1/chat/completions", body)
    assert refused.status_code == 503
    assert "No space left on device" in refused.json()["error"]["message"]
    answered = await caller.post("/v1/chat/completions", body, **{"x-stainless-retry-count": "1"})
    assert answered.json()["choices"][0]["message"]["content"] == "two"
    assert [turn.status for turn in caller.turns] == ["failed", "delivered"]
    assert caller.session.counters["turns_unkept"] == 1
    await until(lambda: [t.status for t in read_traces(tmp_path)[caller.session.session_id]] == ["delivered"])
