"""A recorded run: evaluated on the way and afterwards, trained again bit for bit, graded again."""

import json
import subprocess
from pathlib import Path

import pytest

from calculator import tasks
from calculator.demo import write_rows
from integration_tests.conftest import COMMAND, rows, wait_until_serving
from molt.train.pool.reader import LedgerReader

pytestmark = pytest.mark.timeout(420)

NUM_UPDATES = 5
NUM_HELD_OUT = 6
GRADER = Path(__file__).parent / "agents" / "graded.py"


def command(*arguments):
    """What `molt-train` prints on stdout, which must end well."""
    result = subprocess.run([*COMMAND, *map(str, arguments)], capture_output=True, text=True, timeout=300, check=False)
    assert result.returncode == 0, result.stderr[-3000:]
    return result.stdout


@pytest.fixture(scope="module")
def recorded(run_arguments, tmp_path_factory):
    """The folder of a run that was evaluated before, after, and at every second update."""
    top = tmp_path_factory.mktemp("recorded")
    held_out = top / "held_out.jsonl"
    write_rows(held_out, [tasks.row(expression) for expression in tasks.expressions(0)[1][:NUM_HELD_OUT]])
    command(
        *run_arguments,
        f"run.dir={top / 'run'}",
        f"train.num_updates={NUM_UPDATES}",
        "train.checkpoint_every=0",
        "train.keep_checkpoints=1",
        "actor.optimizer.lr=3e-3",
        f"eval.path={held_out}",
        "eval.every=2",
        "eval.samples=2",
        "eval.max_tokens=7",
        "eval.temperature=0.5",
        "eval.keep_best=true",
    )
    return top / "run"


def test_evaluations_are_pinned_and_sample_in_their_own_way(recorded):
    evaluations = rows(recorded / "evaluations.jsonl")
    assert [row["step"] for row in evaluations] == [0, 2, 4, 5]
    for row in evaluations:
        assert row["oldest_version"] == row["newest_version"] == row["policy_version"] == row["step"]
        assert (row["num_tasks"], row["num_rollouts"], row["num_missing"]) == (NUM_HELD_OUT, 2 * NUM_HELD_OUT, 0)
        assert 0 < row["num_action_tokens_mean"] <= 2 * 7
        assert row["avg@2"] == pytest.approx(row["reward_mean"])
        assert row["pass@1"] <= row["pass@2"]
    reader = LedgerReader.open(recorded / "ledger.db")
    sampled = {
        (group.kind, turn.sampling["temperature"], turn.sampling["max_tokens"])
        for group in reader.groups()
        for row in reader.rollouts(group.group_id)
        if row.recording is not None
        for turn in row.recording.turns
    }
    reader.close()
    assert sampled == {("train", 1.0, 24), ("eval", 0.5, 7)}


def test_the_best_checkpoint_is_kept_and_can_be_evaluated_again(recorded):
    evaluations = {row["step"]: row for row in rows(recorded / "evaluations.jsonl")}
    best = max((step for step in evaluations if step), key=lambda step: (evaluations[step]["reward_mean"], -step))
    checkpoints = recorded / "checkpoints"
    assert (checkpoints / "best").resolve().name == f"step-{best:06d}"
    assert {entry.name for entry in checkpoints.glob("step-*")} == {f"step-{best:06d}", f"step-{NUM_UPDATES:06d}"}
    before = (recorded / "evaluations.jsonl").read_bytes()
    row = json.loads(command("eval", recorded / "config.toml", "--checkpoint", "best", "--json"))
    assert (row["step"], row["policy_version"], row["newest_version"]) == (best, best, best)
    assert row["num_rollouts"] == 2 * NUM_HELD_OUT
    # The same weights and the same seeds.
    assert row["reward_mean"] == pytest.approx(evaluations[best]["reward_mean"], abs=0.05)
    assert row["folder"] == str(recorded.with_name("run-eval-1"))
    (written,) = rows(recorded.with_name("run-eval-1") / "evaluations.jsonl")
    assert written == {name: row[name] for name in written}
    assert (recorded / "evaluations.jsonl").read_bytes() == before


def test_a_replay_makes_the_updates_of_the_run_bit_for_bit(recorded):
    before = {path: path.stat().st_mtime_ns for path in recorded.rglob("*")}
    summary = json.loads(command("replay", recorded))
    assert summary["num_updates"] == NUM_UPDATES
    run, again = rows(recorded / "metrics.jsonl"), rows(Path(summary["folder"]) / "metrics.jsonl")
    same = [name for name in again[0] if name not in ("timing", "dropped")]
    assert {"loss", "grad_norm", "logprob_gap_mean", "reward_mean", "num_action_tokens", "lr"} <= set(same)
    for trained, replayed in zip(run, again, strict=True):
        assert {name: replayed[name] for name in same} == {name: trained[name] for name in same}
    assert all(row["grad_norm"] > 1e-3 for row in run), "nothing was learned from; the test compares nothing"
    last = f"checkpoints/step-{NUM_UPDATES:06d}/model/model.safetensors"
    assert (Path(summary["folder"]) / last).read_bytes() == (recorded / last).read_bytes()
    changed = {path for path in recorded.rglob("*") if before.get(path) != path.stat().st_mtime_ns}
    assert {path.name for path in changed} <= {"run", "ledger.db-shm", "ledger.db-wal"}  # of SQLite's readers


def test_recorded_rollouts_are_graded_again_and_trained_with_their_grades(recorded, tmp_path):
    report = json.loads(command("regrade", recorded, "--agent", GRADER, "--name", "even"))
    num_evaluated = 4 * 2 * NUM_HELD_OUT
    assert report["name"] == "even"
    assert report["rollouts"] >= NUM_UPDATES * 4 * 4 + num_evaluated
    assert report["outcomes"] == {"completed": report["rollouts"]}
    assert report["changed"] > 0
    assert 0 < report["mean_after"] < 1
    summary = json.loads(
        command("replay", recorded, "--grades", "even", "--out", tmp_path / "out", "algorithm.estimator=rloo")
    )
    assert (summary["folder"], summary["grades"]) == (str(tmp_path / "out"), "even")
    run, again = rows(recorded / "metrics.jsonl"), rows(tmp_path / "out" / "metrics.jsonl")
    assert [row["num_action_tokens"] for row in again] == [row["num_action_tokens"] for row in run]
    assert [row["reward_mean"] for row in again] != [row["reward_mean"] for row in run]
    # Before anything was learned both hold the same weights, so that the rewards alone differ.
    assert again[0]["logprob_gap_mean"] == run[0]["logprob_gap_mean"]


def test_a_replay_of_a_run_that_goes_on(start, run_arguments, tmp_path):
    folder = tmp_path / "run"
    process = start(*run_arguments, f"run.dir={folder}", "train.num_updates=100000", "train.checkpoint_every=0")
    wait_until_serving(process)
    while len(rows(folder / "metrics.jsonl")) < 2:
        assert process.popen.poll() is None, process.stderr[-3000:]
    summary = json.loads(command("replay", folder, "train.num_updates=100000"))
    assert summary["num_updates"] >= 2
    run = rows(folder / "metrics.jsonl")
    again = rows(Path(summary["folder"]) / "metrics.jsonl")
    assert [row["loss"] for row in again[:2]] == [row["loss"] for row in run[:2]]
    process.popen.terminate()
    assert process.wait(60) == 1
