"""A pool at work, for test_crash.py to kill: says on stdout what it was told is done, as soon as it was told.

Given a second argument it kills itself, at that point of a write.
"""

import os
import random
import signal
import sys
import time
from pathlib import Path

import numpy as np

from molt.train.config import PoolConfig
from molt.train.pool import payloads, store
from molt.train.pool.ledger import Ledger
from molt.train.pool.pool import Pool
from molt.train.records.rollout import Outcome, Rollout, Task
from molt.train.records.trajectory import Segment


def say(*words):
    os.write(1, (" ".join(map(str, words)) + "\n").encode())


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def half_a_payload(self, *parts):
    os.pwrite(self._file, b"".join(parts)[: sum(map(len, parts)) // 2], self._end)
    die()


def whole_payload(self, *parts):
    os.pwritev(self._file, parts, self._end)
    die()


POINTS = {
    "half_a_payload": (payloads.PayloadWriter, "_write", half_a_payload),
    "whole_payload": (payloads.PayloadWriter, "_write", whole_payload),
    "next_file": (payloads, "sync_folder", lambda _: die()),
    "committed": (store.LedgerStore, "_committed", lambda *_, **__: die()),
    "checkpoint": (store.LedgerStore, "mark_synced", lambda _: die()),
}


def die_at(point):
    """Replace what is called at a point by one that dies in it, but only after some calls."""
    owner, name, deadly = POINTS[point]
    whole, calls_left = getattr(owner, name), [random.randint(2, 4) if point == "next_file" else random.randint(20, 60)]

    def called(*args, **kwargs):
        calls_left[0] -= 1
        return (whole if calls_left[0] else deadly)(*args, **kwargs)

    setattr(owner, name, called)


def segment_of(num_tokens):
    """A segment whose every number follows from its length."""
    numbers = np.arange(num_tokens)
    return Segment(
        segment_id="s",
        turn_ids=[],
        opened_by="start",
        token_ids=numbers.tolist(),
        action_mask=[1] * num_tokens,
        logprobs=(-numbers / 8).tolist(),
        versions=[0] * num_tokens,
        trained=True,
    )


def main(path):
    pool = Pool(Ledger(path), settings=PoolConfig(), clock=time.monotonic, experiences_of=lambda *_: ())
    windows = pool.ledger.windows()
    step = windows[-1].step if windows else 0
    while True:
        position = pool.next_position
        pool.open_group(Task(task_id=str(position), data={}), kind="train", size=4, position=position)
        for lease in pool.acquire("w", 8):
            reward = round(random.random(), 6)
            outcome = Outcome(kind="completed", reward=reward)
            rollout = Rollout(
                rollout_id=lease.rollout_id,
                group_id=lease.group_id,
                attempt=lease.attempt,
                outcome=outcome,
                experiences=(),
            )
            num_tokens = random.randint(1, 3000)
            segment = segment_of(num_tokens)
            if pool.report(lease.lease_id, lease.attempt, rollout, [segment], []).accepted:
                say("accepted", lease.rollout_id, reward, num_tokens)
        step += 1
        group_ids = [group.group_id for group in pool.take(pool.num_ready)]
        pool.ledger.record_window(step, step - 1, group_ids)
        say("window", step, *group_ids)


if __name__ == "__main__":
    # Small, so that everything a long run does happens within a few rollouts.
    payloads.FILE_BYTES = store.CHECKPOINT_BYTES = 200_000
    store.CHECKPOINT_S = 0.0
    for point in sys.argv[2:]:
        die_at(point)
    main(Path(sys.argv[1]))
