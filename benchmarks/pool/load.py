"""The work of the benchmark: rollouts through a pool over a ledger on disk, as the server takes them."""

import random
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np

from molt.train.config import PoolConfig
from molt.train.experience import offload_trained
from molt.train.pool.leases import Assignment
from molt.train.pool.ledger import Ledger
from molt.train.pool.pool import Pool
from molt.train.pool.rows import GroupRow, ResultRow, RolloutRow
from molt.train.records.experience import Experience, Payload
from molt.train.records.recording import Recording
from molt.train.records.rollout import Outcome, Rollout, Task
from molt.train.records.trajectory import Segment
from molt.train.records.turn import Turn
from molt.train.trajectory import build_trajectory

GROUP = 8
"""Rollouts of one task."""
WINDOW = 8
"""Groups of one update."""
VOCABULARY = 151_936
DONE = Outcome(kind="completed", reward=1.0)


class FilePayloads:
    """A payload store outside of the process: a file for each payload."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self._folder, self._num = folder, 0

    def put(self, payload: Payload) -> Path:
        """Write a payload; returns its file."""
        self._num += 1
        path = self._folder / f"{self._num}.npy"
        with path.open("wb") as file:
            for array in (payload.token_ids, payload.action_mask, payload.logprobs, payload.versions):
                np.save(file, array)
        return path

    def get(self, ref: Path) -> Payload:
        """Not here: nothing is trained."""
        raise NotImplementedError(str(ref))

    def experiences(self, segments: Sequence[Segment], rollout_id: str, group_id: str) -> tuple[Experience, ...]:
        """The experiences of the segments that are trained."""
        return offload_trained(segments, self, rollout_id=rollout_id, group_id=group_id)


def conversation(num_turns: int, num_context: int, num_sampled: int) -> list[Turn]:
    """The turns of a session, each with new context and sampled tokens, as the gateway records them."""
    draw, turns, length = random.Random(0), list[Turn](), 0
    for number in range(num_turns):
        length += num_context
        logprobs = np.asarray([-draw.random() for _ in range(num_sampled)], np.float32)
        turns.append(
            Turn(
                turn_id=f"turn-{number}",
                session_id="session",
                wire="chat",
                parent_turn_id=f"turn-{number - 1}" if number else None,
                opened_by=None if number else "start",
                response_id=f"chatcmpl-{draw.getrandbits(96):024x}",
                status="delivered",
                adopted=True,
                auxiliary=False,
                finish_reason="stop",
                prompt_length=length,
                context_ids=[draw.randrange(VOCABULARY) for _ in range(num_context)],
                token_ids=[draw.randrange(VOCABULARY) for _ in range(num_sampled)],
                logprobs=logprobs.tolist(),
                versions=[3] * num_sampled,
                sampling={"temperature": 1.0, "max_tokens": 4096, "seed": number},
            )
        )
        length += num_sampled
    return turns


class Cycles:
    """A pool whose every rollout is leased, given its session and reported; updates consume what is complete."""

    def __init__(self, folder: Path, experiences_of: Callable[..., tuple[Experience, ...]]) -> None:
        self.ledger = Ledger(folder / "ledger.db")
        self.pool = Pool(self.ledger, settings=PoolConfig(), clock=time.monotonic, experiences_of=experiences_of)
        self._experiences_of = experiences_of
        self.step = len(self.ledger.windows())

    def run(self, num_rollouts: int, turns: Sequence[Turn]) -> Iterator[None]:
        """Run so many rollouts; gives control back after each."""
        segments = build_trajectory("session", list(turns)).segments
        for _ in range(num_rollouts):
            assignment = self._acquire()
            self.pool.attach_session(assignment.lease_id, f"session-{assignment.lease_id}")
            self.report(assignment, turns, segments)
            if self.pool.num_ready >= WINDOW:
                self.step += 1
                group_ids = [group.group_id for group in self.pool.take(WINDOW)]
                self.ledger.record_window(self.step, self.step - 1, group_ids)
            yield

    def report(self, assignment: Assignment, turns: Sequence[Turn], segments: Sequence[Segment]) -> None:
        """Report what a session recorded."""
        rollout = Rollout(
            rollout_id=assignment.rollout_id,
            group_id=assignment.group_id,
            attempt=assignment.attempt,
            outcome=DONE,
            experiences=self._experiences_of(segments, assignment.rollout_id, assignment.group_id),
        )
        self.pool.report(assignment.lease_id, assignment.attempt, rollout, segments, turns)

    def _acquire(self) -> Assignment:
        if found := self.pool.acquire("worker", 1):
            return found[0]
        position = self.pool.next_position
        task = Task(task_id=f"task-{position}", data={"prompt": "What is 17 * 23?", "label": "391"})
        self.pool.open_group(task, kind="train", size=GROUP, position=position)
        return self.pool.acquire("worker", 1)[0]


def fill(folder: Path, num_rollouts: int) -> None:
    """Make a ledger of so many rollouts, finished and consumed, with little in each recording."""
    turns = conversation(1, 4, 4)
    segments = build_trajectory("session", turns).segments
    ledger = Ledger(folder / "ledger.db")
    for first in range(0, num_rollouts, GROUP * WINDOW):
        with ledger.transaction():
            group_ids = [_add_group(ledger, first // GROUP + i, turns, segments) for i in range(WINDOW)]
            step = first // (GROUP * WINDOW) + 1
            ledger.record_window(step, step - 1, group_ids)
    ledger.close()


def _add_group(ledger: Ledger, number: int, turns: list[Turn], segments: list[Segment]) -> str:
    group_id = f"g{number + 1}"
    task = Task(task_id=f"task-{number}", data={"prompt": "What is 17 * 23?", "label": "391"})
    ledger.add_group(GroupRow(seq=number + 1, group_id=group_id, kind="train", task=task, size=GROUP, position=number))
    result_id = None
    for member in range(GROUP):
        rollout_id = f"{group_id}.{member}"
        lease_id = f"{rollout_id}.1-{random.getrandbits(64):016x}"
        assignment = Assignment(
            lease_id=lease_id,
            rollout_id=rollout_id,
            group_id=group_id,
            attempt=1,
            task=task,
            kind="train",
            member=member,
            position=number,
        )
        ledger.add_leases([assignment], "worker")
        ledger.attach_session(lease_id, f"session-{lease_id}")
        result_id = ledger.end_attempt(
            RolloutRow(
                rollout_id=rollout_id, group_id=group_id, member=member, state="finished", attempt=1, failures=0
            ),
            lease=(lease_id, "reported"),
            result=ResultRow(outcome=DONE, counted=True, lease_id=lease_id, rollout_id=rollout_id),
            recording=Recording(
                session_id=f"session-{lease_id}", state="closed", turns=turns, segments=segments, counters={"turns": 1}
            ),
        )
    ledger.close_group(group_id, "complete", ready_order=result_id)
    return group_id
