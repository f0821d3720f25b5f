"""A replay gives the ranks what the run gave them: the same rows, in the same windows, with the same advantages."""

import json
from collections import Counter

import msgspec
import pytest

from molt.train.config import AlgorithmConfig, Config, RolloutConfig, TrainConfig
from molt.train.controller.checkpoints import Checkpoints
from molt.train.controller.learning import Learning
from molt.train.controller.replay import RecordedWindows, Replay
from molt.train.controller.results import experiences_into
from molt.train.experience import LocalPayloadStore
from molt.train.observe.journal import Journal, read_journal
from molt.train.pool.reader import LedgerReader
from molt.train.records.rollout import Outcome
from molt.train.records.window import StepReport
from molt.train.trajectory import TrainingRules
from molt.train.window import plan_of

CONFIG = Config(
    train=TrainConfig(groups_per_update=2, num_updates=3, checkpoint_every=2),
    rollout=RolloutConfig(group_size=4),
)


class Actor:
    """Keeps the windows that it is given."""

    def __init__(self):
        self.windows = []

    async def train(self, windows, *, kl_coef):
        self.windows.append(windows)
        step = windows[0].step
        return StepReport(
            step=step, loss=0.5 * step, grad_norm=2.0, lr=1e-3, logprob_gap_mean=0.0, logprob_gap_max=0.0, metrics={}
        )

    async def save(self, folder, *, step, progress):
        folder.mkdir(parents=True)
        (folder / "state").write_text(json.dumps([step, progress]))


def contents(windows):
    """What the ranks learn from, in order."""
    return [
        (
            row.experience.segment_id,
            row.experience.payload.token_ids.tolist(),
            row.experience.payload.action_mask.tolist(),
            row.weight,
            row.advantages.tolist(),
        )
        for update in windows
        for window in update
        for rank in window.ranks
        for microbatch in rank
        for row in microbatch.rows
    ]


async def record_run(pool, tasks, workers, *, num_updates=3):
    """Three windows of two groups, the later group first, as a run trains and records them. Returns what ranks got."""
    actor = Actor()
    learning = Learning(CONFIG, actor, plan_of(CONFIG, hidden_size=64))
    for step in range(1, num_updates + 1):
        ids = [pool.open_group(task, kind="train", size=4, position=None) for task in tasks[:2]]
        for assignment in pool.acquire("w", 100):
            failed = assignment.member == 3
            reward = float((assignment.member + step) % 2)
            workers.report(assignment, reward=reward, version=step - 1, kind="failed" if failed else "completed")
        groups = sorted(pool.take(2), key=lambda group: ids.index(group.group_id), reverse=True)
        pool.ledger.record_window(step, step - 1, [group.group_id for group in groups])
        await learning.update(learning.usable(groups), step=step)
    return actor.windows


@pytest.fixture
def replay(tmp_path):
    """Replay the run of the test's ledger; gives the actor and the folder."""

    async def run(config=CONFIG, *, grades=None, rules=None):
        folder = tmp_path / "replay"
        folder.mkdir()
        reader = LedgerReader.open(tmp_path / "run" / "ledger.db")
        actor = Actor()
        recorded = RecordedWindows(
            reader, experiences_of=experiences_into(LocalPayloadStore()), grades=grades or {}, rules=rules
        )
        with Journal(folder / "metrics.jsonl") as journal:
            await Replay(
                config,
                recorded,
                actor=actor,
                learning=Learning(config, actor, plan_of(config, hidden_size=64)),
                checkpoints=Checkpoints(folder / "checkpoints", keep=5),
                journal=journal,
            ).run(reader.windows())
        reader.close()
        return actor, folder

    return run


@pytest.fixture
def pool(restart_pool):
    return restart_pool()


async def test_the_ranks_get_what_they_got_in_the_run_while_it_goes_on(pool, tasks, make_workers, replay):
    trained = await record_run(pool, tasks, make_workers(pool))
    actor, _ = await replay()  # the run's pool still has its ledger open
    assert contents(actor.windows) == contents(trained)
    assert [windows[0].step for windows in actor.windows] == [1, 2, 3]
    assert any(any(row[4]) for row in contents(trained)), "no advantage is other than 0; the test compares nothing"


async def test_journal_and_checkpoints_are_those_of_a_run(pool, tasks, make_workers, replay):
    await record_run(pool, tasks, make_workers(pool))
    _, folder = await replay()
    rows = read_journal(folder / "metrics.jsonl")
    assert [(row["step"], row["policy_version"], row["loss"]) for row in rows] == [
        (1, 0, 0.5),
        (2, 1, 1.0),
        (3, 2, 1.5),
    ]
    assert [row["num_rollouts"] for row in rows] == [6, 6, 6]
    assert rows[0]["dropped"] == {"rollouts_failed": 2}
    assert rows[0]["reward_mean"] == pytest.approx(4 / 6)  # of members 0, 1, 2: 1, 0, 1
    assert rows[2]["staleness_max"] == 0
    assert sorted(entry.name for entry in (folder / "checkpoints").iterdir()) == ["step-000002", "step-000003"]


async def test_another_algorithm_learns_otherwise_from_the_same_tokens(pool, tasks, make_workers, replay):
    trained = contents(await record_run(pool, tasks, make_workers(pool)))
    other = msgspec.structs.replace(CONFIG, algorithm=AlgorithmConfig(estimator="rloo"))
    actor, _ = await replay(other)
    found = contents(actor.windows)
    assert [row[:3] for row in found] == [row[:3] for row in trained]
    assert [row[4] for row in found] != [row[4] for row in trained]


async def test_grades_stand_for_the_recorded_outcomes(pool, tasks, make_workers, replay):
    await record_run(pool, tasks, make_workers(pool))
    window = pool.ledger.windows()[0]
    first = window.group_ids[0]
    grades = {f"{first}.{member}": Outcome(kind="completed", reward=2.0) for member in (2, 3)}
    actor, folder = await replay(grades=grades)
    row = read_journal(folder / "metrics.jsonl")[0]
    assert (row["num_rollouts"], row["dropped"]) == (7, {"rollouts_failed": 1})  # one failed rollout has a grade now
    assert row["reward_mean"] == pytest.approx(((1 + 0 + 2 + 2) + (1 + 0 + 1)) / 7)
    rises = Counter(row[4][0] > 0 for row in contents(actor.windows[:1]))
    assert rises == {True: 4, False: 3}  # above its group's mean: both graded ones; of the other group members 0 and 2


async def test_other_rules_of_what_is_trained_are_applied_to_the_recorded_turns(pool, tasks, make_workers, replay):
    trained = contents(await record_run(pool, tasks, make_workers(pool)))
    actor, _ = await replay(rules=TrainingRules())
    assert contents(actor.windows) == trained
