"""What a run folder says about a finished run."""

from pathlib import Path

import pytest

from molt.train.controller.run_folder import RunFolder
from molt.train.observe.journal import Journal


def test_every_file_of_a_run_is_in_its_folder(tmp_path):
    folder = RunFolder(tmp_path)
    names = {
        "config": "config.toml",
        "metrics": "metrics.jsonl",
        "evaluations": "evaluations.jsonl",
        "ledger": "ledger.db",
        "checkpoints": "checkpoints",
        "model": "model",
        "logs": "logs",
        "picture": "reward.png",
    }
    assert {name: getattr(folder, name) for name in names} == {name: tmp_path / file for name, file in names.items()}


def test_the_summary_counts_the_updates_draws_them_and_hands_on_the_evaluations(tmp_path):
    folder = RunFolder(tmp_path)
    with Journal(folder.metrics) as metrics, Journal(folder.evaluations) as evaluations:
        for step in (1, 2):
            metrics.append({"step": step, "reward_mean": 0.25 * step, "reward_std": 0.1})
        evaluations.append({"step": 0, "reward_mean": 0.125})
    summary = folder.summarise(seconds=61.26)
    assert summary == {
        "num_updates": 2,
        "seconds": 61.3,
        "evaluations": [{"step": 0, "reward_mean": 0.125}],
        "folder": str(tmp_path),
        "picture": str(folder.picture),
    }
    assert folder.picture.read_bytes().startswith(b"\x89PNG")


def test_a_folder_without_a_run_has_no_summary(tmp_path):
    with pytest.raises(FileNotFoundError):
        RunFolder(Path(tmp_path)).summarise(seconds=0.0)
