"""The demo, short and with learning switched off: the recorded log-probs must be the trainer's."""

import json
import os
import subprocess

import pytest

from integration_tests.conftest import COMMAND, rows
from molt.train.pool.reader import LedgerReader

pytestmark = pytest.mark.timeout(420)


@pytest.fixture(scope="module")
def frozen_demo(tmp_path_factory):
    folder, cache = tmp_path_factory.mktemp("demo") / "run", tmp_path_factory.mktemp("cache")
    arguments = ["demo", "--out", str(folder), "actor.optimizer.lr=0", "train.num_updates=4", "train.max_staleness=2"]
    result = subprocess.run(
        [*COMMAND, *arguments, "run.stall_timeout=120"],
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
        env={**os.environ, "XDG_CACHE_HOME": str(cache)},
    )
    assert result.returncode == 0, result.stderr[-4000:]
    return folder, result


def test_recorded_logprobs_are_the_trainers(frozen_demo):
    folder, _ = frozen_demo
    metrics = rows(folder / "metrics.jsonl")
    assert [row["step"] for row in metrics] == [1, 2, 3, 4]
    assert all(row["logprob_gap_max"] <= 1e-4 for row in metrics)
    # There was something to compare: tool results between the turns, and rollouts older than the weights they train.
    assert all(row["info_mean"]["tool_calls"] > 0.3 for row in metrics)
    assert max(row["staleness_max"] for row in metrics) >= 1
    assert all(row["staleness_max"] <= 2 for row in metrics)


def test_a_request_that_lived_through_a_refit_is_among_them(frozen_demo):
    folder, _ = frozen_demo
    reader = LedgerReader.open(folder / "ledger.db")
    consumed = [group_id for window in reader.windows() for group_id in window.group_ids]
    versions = [
        {version for version in segment.versions if version is not None}
        for group_id in consumed
        for row in reader.rollouts(group_id)
        for segment in row.recording.segments
    ]
    reader.close()
    assert any(len(mixed) > 1 for mixed in versions), "no rollout spanned a refit; the test proves less than it says"


def test_audit_passes(frozen_demo):
    folder, _ = frozen_demo
    result = subprocess.run([*COMMAND, "audit", str(folder)], capture_output=True, text=True, timeout=60, check=False)
    report = json.loads(result.stdout)
    assert result.returncode == 0, report["violations"]
    assert report["num_updates"] == 4
    assert report["delivered_fraction"] == 1.0
    assert report["num_trained_tokens"] == sum(row["num_action_tokens"] for row in rows(folder / "metrics.jsonl"))


def test_run_folder_and_output(frozen_demo):
    folder, result = frozen_demo
    first, *_, last = result.stdout.splitlines()
    assert set(json.loads(first)) == {"url"}
    assert last.startswith("4 updates in ")
    assert str(folder) in last
    assert "update 4/4" in result.stderr
    assert (folder / "reward.png").read_bytes().startswith(b"\x89PNG")
    assert [row["step"] for row in rows(folder / "evaluations.jsonl")] == [0, 4]
    checkpoint = folder / "checkpoints" / "step-000004"
    assert (checkpoint / "model" / "model.safetensors").is_file()
    assert (checkpoint / "model" / "tokenizer.json").is_file()
    assert (folder / "logs" / "server.log").is_file()
