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
    assert read_trace(tmp_path / "s1.trace") == ("s1", tree.turns("s1"))


def test_a_torn_or_damaged_tail_loses_only_itself(tmp_path):
    tree = recorded(Trace(tmp_path, "s1"))
    path = tmp_path / "s1.trace"
    whole = path.read_bytes()
    first_turn = tree.turns("s1")[0]
    for cut in range(len(whole) - 1, len(whole) - 40, -7):
        path.write_bytes(whole[:cut])
        assert read_trace(path)[1] == [first_turn]
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    assert read_trace(path)[1] == [first_turn]


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
        trace.mark("a", status="delivered")
    monkeypatch.undo()
    trace.add(node("c"))
    assert len(read_trace(path)[1]) == 3


def test_a_discarded_trace_is_gone(tmp_path):
    trace = Trace(tmp_path, "s1")
    trace.discard()
    recorded(trace)
    trace.discard()
    assert left_traces(tmp_path) == []
