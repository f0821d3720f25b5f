"""Reading task rows."""

from pathlib import Path

import pytest

from molt.agents import TaskError
from molt.agents.tasks import read_tasks


def test_rows_are_read_in_order_up_to_the_limit(tmp_path: Path):
    path = tmp_path / "tasks.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"prompt": "a"}\n\n{"prompt": "\xc3\xa9"}\r\n{"prompt": "c"}')
    assert read_tasks(path) == [{"prompt": "a"}, {"prompt": "é"}, {"prompt": "c"}]
    assert read_tasks(path, limit=2) == [{"prompt": "a"}, {"prompt": "é"}]


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b'{"prompt": "a"}\n\n{"prompt": \n', "tasks.jsonl, line 3: not JSON"),
        (b'{"prompt": "a"}\n[1, 2]\n', r"tasks.jsonl, line 2: not a JSON object: \[1, 2\]"),
        (b'{"prompt": "\xff"}\n', "tasks.jsonl, line 1: not JSON"),
        (b"\n \n", "tasks.jsonl: no task rows"),
    ],
)
def test_a_bad_file_names_file_and_line(tmp_path: Path, content: bytes, reason: str):
    path = tmp_path / "tasks.jsonl"
    path.write_bytes(content)
    with pytest.raises(TaskError, match=reason):
        read_tasks(path)


def test_a_missing_file_is_named(tmp_path: Path):
    with pytest.raises(TaskError, match=r"none.jsonl: No such file"):
        read_tasks(tmp_path / "none.jsonl")
