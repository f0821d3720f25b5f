"""A pool at work, for test_crash.py to kill: says on stdout what it was told is done, as soon as it was told."""

import os
import random
import sys
import time
from pathlib import Path

from molt.train.config import PoolConfig
from molt.train.pool.ledger import Ledger
from molt.train.pool.pool import Pool
from molt.train.records.rollout import Outcome, Rollout, Task
from molt.train.records.trajectory import Segment


def say(*words):
    os.write(1, (" ".join(map(str, words)) + "\n").encode())


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
            tokens = list(range(random.randint(1, 3000)))
            segment = Segment(
                segment_id="s",
                turn_ids=[],
                opened_by="start",
                token_ids=tokens,
                action_mask=[1] * len(tokens),
                logprobs=[-1.0] * len(tokens),
                versions=[0] * len(tokens),
                trained=True,
            )
            if pool.report(lease.lease_id, lease.attempt, rollout, [segment], []).accepted:
                say("accepted", lease.rollout_id, reward, len(tokens))
        step += 1
        group_ids = [group.group_id for group in pool.take(pool.num_ready)]
        pool.ledger.record_window(step, step - 1, group_ids)
        say("window", step, *group_ids)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
