"""Wherever the trainer dies, the resumed run makes the updates of an undisturbed one, bit for bit."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from integration_tests.rank_windows import NUM_TOKENS, save_policy
from integration_tests.resume_process import CONFIG, KILLED, NUM_UPDATES, RANKS_DIE, UNDISTURBED, live, make_pool
from molt.train.controller.results import experiences_into
from molt.train.experience import LocalPayloadStore
from molt.train.pool.ledger import Ledger
from molt.train.pool.reader import LedgerReader
from molt.train.records.rollout import Outcome, Rollout, Task
from molt.train.records.turn import Turn
from molt.train.trajectory import build_trajectory

pytestmark = pytest.mark.timeout(300)

SPARE = 1
"""Groups that are complete and are not needed."""


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    """A folder with a run in it for every place to die, all of the same recorded rollouts, lived to their ends."""
    folder = tmp_path_factory.mktemp("resume")
    model = save_policy(folder / "model", tied=True)
    settings = json.loads((model / "config.json").read_text())
    # So that training draws random numbers, which have to go on, too.
    (model / "config.json").write_text(json.dumps(settings | {"attention_dropout": 0.1}))
    record(folder / "recorded" / "ledger.db")
    for point in (UNDISTURBED, *KILLED, *RANKS_DIE):
        shutil.copytree(folder / "recorded", folder / point)
    process = live(folder, model)
    try:
        assert process.wait(280) == 0, (folder / "log").read_text()[-5000:]
    finally:
        process.kill()
    return folder


def record(path: Path) -> None:
    """Rollouts of all groups that the run needs, and a spare one: sampled by nobody, but recorded as if."""
    draw, store = np.random.default_rng(0), LocalPayloadStore()
    path.parent.mkdir()
    ledger = Ledger(path)
    pool, experiences_of = make_pool(ledger, store), experiences_into(store)
    for position in range(NUM_UPDATES * CONFIG.train.groups_per_update + SPARE):
        task = Task(task_id=f"t{position}", data={})
        pool.open_group(task, kind="train", size=CONFIG.rollout.group_size, position=position)
    for assignment in pool.acquire("w", 10_000):
        turn = make_turn(assignment.lease_id, draw)
        segments = build_trajectory(assignment.lease_id, [turn]).segments
        rollout = Rollout(
            rollout_id=assignment.rollout_id,
            group_id=assignment.group_id,
            attempt=assignment.attempt,
            outcome=Outcome(kind="completed", reward=float(draw.random())),
            experiences=experiences_of(segments, assignment.rollout_id, assignment.group_id),
        )
        assert pool.report(assignment.lease_id, assignment.attempt, rollout, segments, [turn]).accepted
    ledger.close()


def make_turn(name: str, draw: np.random.Generator) -> Turn:
    num_context, num_sampled = draw.integers(2, 8, 2).tolist()
    tokens = draw.integers(0, NUM_TOKENS, num_context + num_sampled).tolist()
    return Turn(
        turn_id=f"{name}-t",
        session_id=name,
        wire="chat",
        parent_turn_id=None,
        opened_by="start",
        response_id="r",
        status="delivered",
        adopted=True,
        auxiliary=False,
        finish_reason="stop",
        prompt_length=num_context,
        context_ids=tokens[:num_context],
        token_ids=tokens[num_context:],
        logprobs=draw.uniform(-4.0, -2.0, num_sampled).astype(np.float32).tolist(),
        versions=[0] * num_sampled,
    )


def updates(folder: Path) -> list[dict]:
    """The journal, without what time it took."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in row.items() if name != "timing"} for row in rows]


def weights(folder: Path) -> bytes:
    return (folder / "checkpoints" / f"step-{NUM_UPDATES:06d}" / "model" / "model.safetensors").read_bytes()


def windows(folder: Path) -> list:
    reader = LedgerReader.open(folder / "ledger.db")
    try:
        return reader.windows()
    finally:
        reader.close()


def test_the_undisturbed_run_shows_something(runs):
    rows = updates(runs / UNDISTURBED)
    assert [row["step"] for row in rows] == list(range(1, NUM_UPDATES + 1))
    assert len({row["loss"] for row in rows}) == NUM_UPDATES
    assert len({row["kl_coef"] for row in rows}) == NUM_UPDATES, "the coefficient adapts"
    assert len({row["lr"] for row in rows}) == NUM_UPDATES, "the learning rate has a schedule"


@pytest.mark.parametrize("point", [*KILLED, *RANKS_DIE])
def test_every_update_is_that_of_the_undisturbed_run_bit_for_bit(runs, point):
    assert updates(runs / point) == updates(runs / UNDISTURBED)
    assert weights(runs / point) == weights(runs / UNDISTURBED)
    assert windows(runs / point) == windows(runs / UNDISTURBED)


@pytest.mark.parametrize("point", [UNDISTURBED, *KILLED])
def test_groups_that_were_finished_and_not_trained_are_kept(runs, point):
    reader = LedgerReader.open(runs / point / "ledger.db")
    try:
        states = [group.state for group in reader.groups()]
    finally:
        reader.close()
    assert states == ["consumed"] * (NUM_UPDATES * CONFIG.train.groups_per_update) + ["complete"] * SPARE
