"""The audit finds every kind of violation in a ledger, and nothing in a sound one."""

import json
import sqlite3
import time

import msgspec
import pytest

from molt.train.audit import audit
from molt.train.cli import main
from molt.train.config import AlgorithmConfig, Config, PoolConfig, RolloutConfig, TrainConfig, to_toml
from molt.train.controller.results import experiences_into
from molt.train.errors import ConfigError
from molt.train.experience import LocalPayloadStore
from molt.train.observe.journal import Journal
from molt.train.pool.frames import encode_frame
from molt.train.pool.ledger import Ledger
from molt.train.pool.payloads import PayloadWriter
from molt.train.pool.pool import Pool
from molt.train.pool.reader import LedgerReader
from molt.train.records.rollout import Outcome, Rollout, Task
from molt.train.records.turn import Turn
from molt.train.trajectory import build_trajectory

EXPERIENCES_OF = experiences_into(LocalPayloadStore())
MAX_STALENESS = 1


def turn(name, parent=None, *, version=0, **changes):
    """One call: two tokens of context (a tool's, say) and two sampled ones."""
    before = 0 if parent is None else parent.prompt_length + len(parent.token_ids)
    values = {
        "turn_id": name,
        "session_id": "s",
        "wire": "chat",
        "parent_turn_id": parent and parent.turn_id,
        "opened_by": None if parent else "start",
        "response_id": "r",
        "status": "delivered",
        "adopted": True,
        "auxiliary": False,
        "finish_reason": "stop",
        "prompt_length": before + 2,
        "context_ids": [before + 1, before + 2],
        "token_ids": [before + 3, before + 4],
        "logprobs": [-0.5, -0.25],
        "versions": [version, version],
        **changes,
    }
    return Turn(**values)


def conversation(version=0):
    """Two turns in a row, a branch of the first that nobody went on with, and one that never reached its client."""
    first = turn("t1", version=version)
    return [
        first,
        turn("t2", first, version=version),
        turn("t3", first, adopted=False),
        turn("t4", first, status="undelivered", adopted=False),
    ]


class Run:
    """A run folder of two updates of one group each, written by the pool as a real run's is."""

    def __init__(self, folder):
        self.folder = folder
        folder.mkdir()
        self.configure(train=TrainConfig(max_staleness=MAX_STALENESS))
        with Journal(folder / "metrics.jsonl") as journal:
            for step in (1, 2):
                journal.append({"step": step, "num_action_tokens": 8})
        ledger = Ledger(folder / "ledger.db")
        pool = Pool(ledger, settings=PoolConfig(), clock=time.monotonic, experiences_of=EXPERIENCES_OF)
        for position in (0, 1):
            pool.open_group(Task(task_id="t", data={}), kind="train", size=2, position=position)
        for assignment in pool.acquire("w", 4):
            self._finish(pool, assignment)
        for step, group in enumerate(pool.take(2), start=1):
            ledger.record_window(step, step - 1, [group.group_id])
        ledger.close()

    def configure(self, **sections):
        (self.folder / "config.toml").write_text(to_toml(Config(**sections)))

    @staticmethod
    def _finish(pool, assignment):
        turns = conversation()
        segments = build_trajectory(assignment.rollout_id, turns).segments
        rollout = Rollout(
            rollout_id=assignment.rollout_id,
            group_id=assignment.group_id,
            attempt=assignment.attempt,
            outcome=Outcome(kind="completed", reward=1.0),
            experiences=EXPERIENCES_OF(segments, assignment.rollout_id, assignment.group_id),
        )
        pool.report(assignment.lease_id, assignment.attempt, rollout, segments, turns)

    def change(self, rollout_id, *, segments=None, turns=None):
        """Rewrite what the ledger holds of a rollout, as a fault of the program would have written it."""
        reader = LedgerReader.open(self.folder / "ledger.db")
        (recording,) = [r.recording for r in reader.rollouts(rollout_id.split(".")[0]) if r.rollout_id == rollout_id]
        reader.close()
        new_turns = recording.turns if turns is None else turns(recording.turns)
        new_segments = recording.segments if segments is None else segments(recording.segments)
        writer = PayloadWriter(self.folder / "payloads")
        place = writer.append(encode_frame(new_turns, new_segments))
        writer.close()
        self.execute(
            "UPDATE recordings SET file = ?, offset = ?, length = ?, crc = ? WHERE "
            "recording_id = (SELECT recording_id FROM results WHERE rollout_id = ? AND counted)",
            *place,
            rollout_id,
        )

    def change_segment(self, rollout_id, **changes):
        """Change the first segment, which trains `t1` and `t2`."""
        self.change(rollout_id, segments=lambda old: [msgspec.structs.replace(old[0], **changes), *old[1:]])

    def execute(self, statement, *values):
        db = sqlite3.connect(self.folder / "ledger.db")
        db.execute(statement, values)
        db.commit()
        db.close()


@pytest.fixture
def run(tmp_path):
    return Run(tmp_path / "run")


def violations(run):
    report = audit(run.folder)
    assert report.passed == (not report.violations)
    return report.violations


def test_a_sound_run_passes_and_is_counted(run):
    report = audit(run.folder)
    assert report.violations == []
    assert (report.num_updates, report.num_rollouts, report.num_segments) == (2, 4, 12)
    assert report.num_trained_tokens == 16, "two turns of two tokens, four rollouts"
    assert report.delivered_fraction == 6 / 8, "one of four turns never reached its client"
    assert report.forks == {"start": 12}
    assert report.untrained == {"not_adopted": 4, "undelivered": 4}
    assert not report.keep_stale_cache


def test_a_run_whose_prefix_cache_outlives_its_weights_is_told_apart(run):
    path = run.folder / "config.toml"
    path.write_text(path.read_text().replace("keep_stale_cache = false", "keep_stale_cache = true"))
    assert audit(run.folder).as_dict()["keep_stale_cache"] is True


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"token_ids": [1, 2, 9, 4, 5, 6, 7, 8]}, "its tokens are not those of its turns"),
        ({"token_ids": [9, 2, 3, 4, 5, 6, 7, 8]}, "its tokens are not those of its turns"),
        (
            {"logprobs": [0.0, 0.0, -0.5, -0.125, 0.0, 0.0, -0.5, -0.25]},
            "turn t1: its log-probs are not the engine's",
        ),
        (
            {"versions": [None, None, 0, 0, None, None, 0, 1]},
            "turn t2: its policy versions are not the engine's",
        ),
        ({"action_mask": [0, 0, 1, 1, 0, 0, 1, 0]}, "turn t2 is trained in part"),
        ({"action_mask": [0, 1, 1, 1, 0, 0, 1, 1]}, "a token that no turn sampled is an action"),
        ({"turn_ids": ["t2", "t1"]}, "turn t2 does not continue the turn before it"),
        ({"turn_ids": ["t1", "t9"]}, "turn t9 is not in the recording"),
        ({"action_mask": [0, 0, 1, 1]}, "its tokens, actions, log-probs and versions have lengths [8, 4, 8, 8]"),
    ],
)
def test_a_row_that_is_not_what_the_engine_saw_and_said_is_found(run, changes, found):
    run.change_segment("g1.0", **changes)
    assert f"rollout g1.0, segment g1.0/0: {found}" in violations(run)


def test_a_changed_context_of_a_later_turn_is_found(run):
    run.change(
        "g1.0",
        turns=lambda old: [
            msgspec.structs.replace(t, context_ids=[5], token_ids=[6, 7, 8], logprobs=[-1.0] * 3, versions=[0] * 3)
            if t.turn_id == "t2"
            else t
            for t in old
        ],
    )
    assert "rollout g1.0, segment g1.0/0: turn t2 was sampled after 6 tokens, but its row has 5 there" in violations(
        run
    )


@pytest.mark.parametrize(
    "change", [{"status": "undelivered"}, {"adopted": False}, {"auxiliary": True}, {"off_policy": ["grammar"]}]
)
def test_a_trained_turn_that_must_not_be_is_found(run, change):
    run.change("g1.0", turns=lambda old: [msgspec.structs.replace(old[0], **change), *old[1:]])
    assert any("turn t1 is trained, but it was" in violation for violation in violations(run))


@pytest.mark.parametrize(
    ("change", "rollout"),
    [
        ({"auxiliary": True}, RolloutConfig(train_auxiliary=True)),
        ({"off_policy": ["grammar"]}, RolloutConfig(train_off_policy=True)),
        ({"sampling": {"temperature": 0.5}}, RolloutConfig(temperature=1.0)),
    ],
)
def test_a_trained_turn_that_the_run_was_told_to_train_is_none(run, change, rollout):
    run.configure(rollout=rollout)
    run.change("g1.0", turns=lambda old: [msgspec.structs.replace(old[0], **change), *old[1:]])
    assert violations(run) == []


def test_a_turn_of_another_temperature_is_found_where_the_loss_does_not_weigh_it(run):
    run.configure(algorithm=AlgorithmConfig(correction="none"), train=TrainConfig(max_staleness=0))
    run.change("g1.0", turns=lambda old: [msgspec.structs.replace(old[0], sampling={"temperature": 0.5}), *old[1:]])
    found = "turn t1 is trained, but it was sampled off-policy: temperature"
    assert any(found in violation for violation in violations(run))


def test_a_turn_that_two_segments_train_is_found(run):
    def train_again(segments):
        second = msgspec.structs.replace(
            segments[1], action_mask=[0, 0, 1, 1, 0, 0, 0, 0], trained=True, untrained_reason=None
        )
        return [segments[0], second, *segments[2:]]

    run.change("g2.1", segments=train_again)
    assert "rollout g2.1: turn t1 is trained by 2 segments" in violations(run)


def of_version(version):
    def turns(old):
        return [msgspec.structs.replace(t, versions=[version] * len(t.versions)) for t in old]

    def segments(old):
        return [msgspec.structs.replace(s, versions=[None if v is None else version for v in s.versions]) for s in old]

    return {"turns": turns, "segments": segments}


def test_a_token_older_than_the_bound_is_found(run):
    run.execute("UPDATE windows SET policy_version = 2 WHERE step = 2")
    assert violations(run) == [
        f"rollout g2.{member}, segment g2.{member}/0: update 2 trained a token of version 0: older than 1 versions"
        for member in (0, 1)
    ]


def test_a_token_as_old_as_the_bound_is_none(run):
    run.execute("UPDATE windows SET policy_version = 1 WHERE step = 2")
    assert violations(run) == []


def test_a_token_of_a_version_that_did_not_exist_yet_is_found(run):
    run.change("g1.1", **of_version(1))
    assert violations(run) == [
        "rollout g1.1, segment g1.1/0: update 1 trained a token of version 1, which did not exist yet"
    ]


def test_an_action_without_a_version_is_found(run):
    run.change_segment("g1.0", versions=[None, None, 0, 0, None, None, 0, None])
    assert "rollout g1.0, segment g1.0/0: an action has no policy version" in violations(run)


def test_a_group_that_two_windows_consumed_is_found(run):
    run.execute("UPDATE windows SET group_ids = ? WHERE step = 2", json.dumps(["g1"]).encode())
    assert violations(run) == ["group g1 was consumed by 2 windows"]


def test_a_consumed_rollout_without_a_result_is_found(run):
    run.execute("UPDATE rollouts SET result_id = NULL WHERE rollout_id = 'g1.0'")
    assert "rollout g1.0 was consumed by update 1 without a result" in violations(run)


def test_a_recording_that_its_file_does_not_hold_any_more_is_found_and_the_rest_is_looked_at(run):
    run.change_segment("g2.0", token_ids=[0] * 8)
    path = run.folder / "payloads" / "000001.bin"
    db = sqlite3.connect(run.folder / "ledger.db")
    places = db.execute("SELECT offset, length FROM recordings ORDER BY recording_id").fetchall()
    db.close()
    data = bytearray(path.read_bytes())
    data[places[1][0] + 30] ^= 1
    data[places[3][0]] ^= 1
    path.write_bytes(data)
    report = audit(run.folder)
    first, second, *rest = report.violations
    assert first == f"payload file {str(path)!r}: the record at offset {places[1][0]} is damaged: its checksum is wrong"
    assert f"the record at offset {places[3][0]} is damaged: its head is another one" in second
    assert "rollout g1.1 was consumed by update 1 without a recording" in rest
    assert "rollout g2.0, segment g2.0/0: its tokens are not those of its turns" in rest
    assert report.num_rollouts == 4


def test_a_member_that_was_cut_is_none_of_the_group_and_one_that_was_lost_trains_nothing(run):
    run.execute("UPDATE rollouts SET result_id = NULL, state = 'cut' WHERE rollout_id = 'g1.0'")
    run.execute("UPDATE results SET recording_id = NULL, outcome = 'infrastructure' WHERE rollout_id = 'g2.0'")
    with Journal(run.folder / "metrics.jsonl") as journal:
        journal.truncate_after(0)
        for step in (1, 2):
            journal.append({"step": step, "num_action_tokens": 4})
    report = audit(run.folder)
    assert (report.violations, report.num_rollouts, report.num_trained_tokens) == ([], 3, 8)


def test_other_trained_tokens_than_the_recordings_hold_are_found(run):
    with Journal(run.folder / "metrics.jsonl") as journal:
        journal.truncate_after(1)
        journal.append({"step": 2, "num_action_tokens": 7})
    assert violations(run) == ["update 2: 7 action tokens were trained, but the recordings hold 8"]


def test_no_more_violations_are_listed_than_anyone_reads(run, monkeypatch):
    monkeypatch.setattr("molt.train.audit.MAX_VIOLATIONS", 3)
    for rollout_id in ("g1.0", "g1.1", "g2.0", "g2.1"):
        run.change_segment(rollout_id, token_ids=[0] * 8)
    assert len(violations(run)) == 3


def test_a_run_that_is_still_being_written_can_be_audited(run):
    ledger = Ledger(run.folder / "ledger.db")
    assert audit(run.folder).passed
    ledger.close()


def test_without_updates_every_session_is_audited_as_the_gateways_are(run):
    run.execute("DELETE FROM windows")
    (run.folder / "metrics.jsonl").unlink()
    report = audit(run.folder)
    assert (report.passed, report.num_updates, report.num_rollouts, report.num_segments) == (True, 0, 4, 12)
    assert (report.num_trained_tokens, report.delivered_fraction, report.forks) == (16, 6 / 8, {"start": 12})
    run.change_segment("g1.0", token_ids=[0] * 8)
    (violation,) = violations(run)
    assert violation.endswith("segment g1.0/0: its tokens are not those of its turns")
    assert violation.startswith("session ")


def test_a_folder_without_a_run_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"holds no run: there is no ledger.db in it"):
        audit(tmp_path)


def test_the_command_prints_the_report_and_ends_with_0_for_a_sound_run(run, capsys):
    assert main(["audit", str(run.folder)]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["passed"], report["delivered_fraction"], report["forks"]) == (True, 0.75, {"start": 12})


def test_the_command_ends_with_1_for_a_violation_and_2_for_no_run(run, tmp_path, capsys):
    run.change_segment("g1.0", token_ids=[0] * 8)
    assert main(["audit", str(run.folder)]) == 1
    assert json.loads(capsys.readouterr().out)["passed"] is False
    assert main(["audit", str(tmp_path)]) == 2
    assert capsys.readouterr().err.startswith("molt-train: error: ")
