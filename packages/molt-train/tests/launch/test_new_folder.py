"""Where a command writes that looks at a run: beside it, never into it, and over nothing."""

import pytest

from molt.train.errors import ConfigError
from molt.train.launch.new_folder import new_folder


def test_the_first_free_number_beside_the_run(tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    assert new_folder(None, run_dir=run, name="replay") == tmp_path / "run-replay-1"
    (tmp_path / "run-replay-1").mkdir()
    assert new_folder(None, run_dir=run, name="replay") == tmp_path / "run-replay-2"
    assert new_folder(None, run_dir=run, name="eval") == tmp_path / "run-eval-1"
    assert not (tmp_path / "run-replay-2").exists()


def test_a_new_or_an_empty_folder_is_taken_as_given(tmp_path):
    (tmp_path / "empty").mkdir()
    for name in ("empty", "new"):
        assert new_folder(tmp_path / name, run_dir=tmp_path / "run", name="eval") == tmp_path / name
    assert new_folder(tmp_path / "new", run_dir=None, name="eval") == tmp_path / "new"


@pytest.mark.parametrize(
    ("out", "message"),
    [("run", "in the folder of the run itself"), ("run/sub", "in the folder of the run"), ("full", "which exists")],
)
def test_nothing_is_written_into_a_run_or_over_anything(tmp_path, out, message):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "a").write_text("")
    with pytest.raises(ConfigError, match=message):
        new_folder(tmp_path / out, run_dir=tmp_path / "run", name="replay")


def test_neither_a_run_nor_a_folder(tmp_path):
    with pytest.raises(ConfigError, match=r"run\.dir is empty: give the folder of the run, or --out DIR"):
        new_folder(None, run_dir=None, name="eval")
