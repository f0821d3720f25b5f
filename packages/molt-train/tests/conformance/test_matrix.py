"""The command `molt-train conformance`, with clients that are there and clients that are not."""

import json

import pytest

from molt.train.cli import main
from molt.train.conformance import Row, format_table


def rows(capsys):
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


@pytest.mark.timeout(120)  # a gateway is started
def test_an_sdk_does_the_task_whole_and_streamed(capsys):
    assert main(["conformance", "--harness", "anthropic-python", "--json"]) == 0
    found = rows(capsys)
    assert [(row["wire"], row["result"], row["turns"], row["forks"]) for row in found] == [
        ("messages whole", "pass", 3, 0),
        ("messages streamed", "pass", 3, 0),
    ]
    assert all(row["version"] and not row["note"] for row in found)


def test_an_unknown_name_is_bad_input_and_the_known_ones_are_listed(capsys):
    assert main(["conformance", "--harness", "emacs"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("molt-train: error: --harness 'emacs' is not one of openai-python, anthropic-python, ")
    assert "claude_code, codex, mini_swe_agent, openai_agents, langgraph" in error


def test_a_harness_asked_for_by_name_has_to_be_there(capsys, tmp_path):
    python = tmp_path / "python"
    assert main(["conformance", "--harness", "mini-swe-agent", "--python", str(python), "--json"]) == 1
    (row,) = rows(capsys)
    assert (row["client"], row["result"]) == ("mini_swe_agent", "not installed")
    assert row["note"] == f"molt-agent is not installed for {python}"


@pytest.mark.parametrize("note", ["", "turn t is not in the engine's log"])
def test_the_table_is_aligned(note):
    table = format_table(
        [
            Row(client="codex", version="0.171.0", wire="responses", result="fail", turns=3, forks=1, note=note),
            Row(client="langgraph", result="not installed"),
        ]
    )
    assert table.splitlines() == [
        "client     version  wire       result         turns  forks  note",
        f"codex      0.171.0  responses  fail           3      1      {note}".rstrip(),
        "langgraph                      not installed",
    ]
