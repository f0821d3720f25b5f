"""What must hold of every recording, whatever clients and engines did, checked against the scripted engine's log."""

from collections import Counter
from collections.abc import Iterable
from typing import Any

from molt.train.gateway.sessions import Session
from molt.train.records.turn import Turn
from molt.train.trajectory import build_trajectory

_STATUSES = {"stop": ("delivered", "undelivered"), "length": ("delivered", "undelivered"), "error": ("failed",)}


def check_ledger(sessions: Iterable[Session], log: Iterable[dict[str, Any]]) -> None:
    """Check closed or quiet sessions against the lines of the engine log that their calls wrote.

    Every engine call is one turn of one session, or a counted try at an engine that was dead. Every turn is what the
    engine was given and gave, behind its parent's row in the same session. What is trained was delivered, once.
    """
    calls: dict[str, list[dict[str, Any]]] = {}
    for line in log:
        calls.setdefault(line["request_id"].partition("-")[0], []).append(line)
    for session in sessions:
        turns = session.turns()
        rows: dict[str, list[int]] = {}
        held = 0
        for turn in turns:
            tries = calls.pop(turn.turn_id, [])
            held += len(tries[:-1])
            # What a dying engine had sampled of a reply that was asked for whole died with it.
            assert all(dead["finish_reason"] == "error" for dead in tries[:-1]), f"{turn.turn_id}: asked twice"
            rows[turn.turn_id] = _check_turn(turn, tries[-1] if tries else None, rows)
        assert held <= session.counters["engine_dead_held"]
        assert sum(turn.status == "failed" for turn in turns) == session.counters["engine_failed"]
        _check_training(session.session_id, turns, rows)
    assert not calls, f"engine calls of no turn: {sorted(calls)}"


def _check_turn(turn: Turn, line: dict[str, Any] | None, rows: dict[str, list[int]]) -> list[int]:
    """Returns the turn's row."""
    name = f"turn {turn.turn_id} ({turn.status})"
    prompt = [*(rows[turn.parent_turn_id] if turn.parent_turn_id else []), *turn.context_ids]
    assert (turn.parent_turn_id is None) == (turn.opened_by is not None), name
    assert len(turn.token_ids) == len(turn.logprobs) == len(turn.versions), name
    assert turn.prompt_length == len(prompt), name
    if line is None:  # given up, or failed, before the engine had it
        assert turn.status in ("aborted", "failed"), name
        assert not turn.token_ids, name
        return prompt
    assert prompt == line["prompt_token_ids"], f"{name}: not the prompt that the engine was given"
    length = len(turn.token_ids)
    # A generation asked for whole that breaks off never hands over what it had sampled.
    assert turn.status in ("aborted", "failed") or length == len(line["token_ids"]), name
    assert turn.token_ids == line["token_ids"][:length], name
    assert turn.logprobs == line["logprobs"][:length], name
    if turn.status != "aborted":
        assert not line["aborted"], name
        assert turn.status in _STATUSES[line["finish_reason"]], f"{name}: the engine said {line['finish_reason']}"
    return prompt + turn.token_ids


def _check_training(session_id: str, turns: list[Turn], rows: dict[str, list[int]]) -> None:
    by_id = {turn.turn_id: turn for turn in turns}
    trained = Counter[str]()
    for segment in build_trajectory(session_id, turns).segments:
        position = 0
        for turn_id in segment.turn_ids:
            turn = by_id[turn_id]
            position += len(turn.context_ids)
            mask = segment.action_mask[position : position + len(turn.token_ids)]
            position += len(turn.token_ids)
            assert set(mask) <= {0, 1}
            assert len(set(mask)) <= 1, f"turn {turn_id} is trained in part"
            trained[turn_id] += any(mask)
            assert segment.token_ids[:position] == rows[turn_id], f"turn {turn_id} stands in a row of another context"
        assert position == len(segment.token_ids)
    for turn_id, times in trained.items():
        assert times <= 1, f"turn {turn_id} is trained {times} times"
        if times:
            assert by_id[turn_id].status == "delivered", f"turn {turn_id} is trained, but {by_id[turn_id].status}"
