"""The checker finds every kind of fault that is planted in sound evidence, and nothing in the evidence as it is."""

from collections import Counter

import msgspec
import pytest

from integration_tests.simulation.api import Acknowledgement
from integration_tests.simulation.check import check
from integration_tests.simulation.evidence import Evidence, TrainedRow, TrainedWindow, fingerprint
from molt.train.config import Config, RolloutConfig, TrainConfig
from molt.train.pool.rows import GroupRow, LeaseRow, ResultRow, RolloutRow, WindowRow
from molt.train.records.recording import Recording
from molt.train.records.rollout import Outcome, Task
from molt.train.records.turn import Turn
from molt.train.trajectory import build_trajectory

BOUND = 1
CONTEXT, SAMPLED, LOGPROBS = [5, 6], [7, 8], [-0.5, -0.25]


def turn(name, parent=None, *, version):
    """A call after `parent`: two tokens of context, two sampled ones."""
    return Turn(
        turn_id=name,
        session_id=name[0],
        wire="chat",
        parent_turn_id=parent and parent.turn_id,
        opened_by=None if parent else "start",
        response_id="r",
        status="delivered",
        adopted=True,
        auxiliary=False,
        finish_reason="stop",
        prompt_length=(parent.prompt_length + 2 if parent else 0) + 2,
        context_ids=CONTEXT,
        token_ids=SAMPLED,
        logprobs=LOGPROBS,
        versions=[version, version],
    )


class Books:
    """A sound run of two updates, one group of two rollouts each; a third group failed, a fourth was dropped."""

    def __init__(self):
        self.rollouts: dict[str, list[RolloutRow]] = {}
        self.evidence = Evidence(
            config=Config(
                train=TrainConfig(num_updates=2, groups_per_update=1, max_staleness=BOUND),
                rollout=RolloutConfig(group_size=8),
            ),
            groups=[],
            rollouts_of=lambda group_id: self.rollouts.get(group_id, []),
            windows=[],
            leases=[],
            results=[],
            journal=[{"step": 1}, {"step": 2}],
            acknowledged=[],
            trained=[],
            sampled=Counter(),
            quarantined={"deadly": ["no heartbeat"]},
            deadly_tasks=frozenset({"deadly"}),
        )
        for number, (state, reason, step) in enumerate(
            [("consumed", None, 1), ("consumed", None, 2), ("failed", "lost", None), ("dropped", "stale", None)], 1
        ):
            self._group(f"g{number}", number, state, reason, step)
        for step in (1, 2):
            self.evidence.windows.append(WindowRow(step=step, policy_version=step - 1, group_ids=(f"g{step}",)))
            self.evidence.trained.append(self._made(step))

    def _group(self, group_id, number, state, reason, step):
        task = Task(task_id="deadly" if state == "failed" else f"t{number}", data={})
        row = GroupRow(
            seq=number, group_id=group_id, kind="train", task=task, size=2, state=state, reason=reason, step=step
        )
        self.evidence.groups.append(row)
        self.rollouts[group_id] = [self._rollout(group_id, member, version=max(0, number - 2)) for member in (0, 1)]

    def _rollout(self, group_id, member, *, version):
        """One that took two attempts: the first lease expired."""
        rollout_id = f"{group_id}.{member}"
        first = turn(f"{rollout_id}a", version=version)
        turns = [first, turn(f"{rollout_id}b", first, version=version)]
        recording = Recording(
            session_id=rollout_id,
            state="closed",
            turns=turns,
            segments=build_trajectory(rollout_id, turns).segments,
            counters={},
        )
        for prompt in (CONTEXT, CONTEXT + SAMPLED + CONTEXT):
            self.evidence.sampled[fingerprint(prompt, SAMPLED, LOGPROBS, version)] += 1
        outcome = Outcome(kind="completed", reward=float(member))
        for attempt, lease_state in ((1, "expired"), (2, "reported")):
            lease = LeaseRow(
                lease_id=f"{rollout_id}.{attempt}",
                rollout_id=rollout_id,
                group_id=group_id,
                attempt=attempt,
                worker_id="w",
                session_id=rollout_id,
                state=lease_state,
                granted=0.0,
                ended=1.0,
            )
            self.evidence.leases.append(lease)
        lost = ResultRow(outcome=Outcome(kind="infrastructure"), counted=False, reason="again", rollout_id=rollout_id)
        counted = ResultRow(outcome=outcome, counted=True, lease_id=lease.lease_id, rollout_id=rollout_id, attempt=2)
        self.evidence.results += [lost, counted]
        self.evidence.acknowledged.append(
            Acknowledgement(
                lease_id=lease.lease_id,
                attempt=2,
                outcome="completed",
                reward=outcome.reward,
                accepted=True,
                reason=None,
            )
        )
        return RolloutRow(
            rollout_id=rollout_id,
            group_id=group_id,
            member=member,
            state="finished",
            attempt=2,
            failures=1,
            outcome=outcome,
            recording=recording,
        )

    def _made(self, step):
        rows = [
            TrainedRow(
                segment_id=segment.segment_id,
                token_ids=SAMPLED * 2,
                logprobs=LOGPROBS * 2,
                versions=[version for turn in rollout.recording.turns for version in turn.versions],
            )
            for rollout in self.rollouts[f"g{step}"]
            for segment in rollout.recording.segments
        ]
        return TrainedWindow(step=step, policy_version=step - 1, rows=rows, num_payloads=4)

    def change(self, table, index, **changes):
        """Rewrite a record of the evidence."""
        rows = getattr(self.evidence, table)
        rows[index] = msgspec.structs.replace(rows[index], **changes)

    def change_turns(self, group_id, change):
        """Rewrite the turns of a group's first rollout."""
        row = self.rollouts[group_id][0]
        turns = [change(number, old) for number, old in enumerate(row.recording.turns)]
        recording = msgspec.structs.replace(row.recording, turns=turns)
        self.rollouts[group_id][0] = msgspec.structs.replace(row, recording=recording)

    def change_row(self, step, **changes):
        """Rewrite the first row that the actor was given for an update."""
        made = self.evidence.trained[step - 1]
        rows = [msgspec.structs.replace(made.rows[0], **changes), *made.rows[1:]]
        self.change("trained", step - 1, rows=rows)


@pytest.fixture
def books():
    return Books()


def test_sound_evidence_has_no_violation(books):
    assert check(books.evidence) == []


def test_an_update_that_was_made_again_alike_is_sound(books):
    books.evidence.trained += books.evidence.trained
    assert check(books.evidence) == []


def plant_consumed_twice(books):
    books.change("windows", 1, group_ids=("g1",))


def plant_open_group(books):
    books.change("groups", 2, state="complete")


def plant_dropped_without_reason(books):
    books.change("groups", 3, reason=None)


def plant_unknown_group(books):
    books.change("windows", 1, group_ids=("g9",))


def plant_missing_window(books):
    del books.evidence.windows[0]


def plant_version_of_a_window(books):
    books.change("windows", 1, policy_version=0)


def plant_short_window(books):
    books.change("windows", 1, group_ids=())


def plant_journal_twice(books):
    books.evidence.journal.append({"step": 2})


def plant_update_never_made(books):
    del books.evidence.trained[1]


def plant_update_skipped(books):
    books.change("trained", 0, step=0, policy_version=-1)


def plant_other_tokens(books):
    books.change_row(1, token_ids=[7, 8, 7, 9])


def plant_other_logprobs(books):
    books.change_row(1, logprobs=[-0.5, -0.25, -0.5, -0.2])


def plant_left_out_row(books):
    books.change("trained", 0, rows=books.evidence.trained[0].rows[:1])


def plant_foreign_row(books):
    books.change_row(1, segment_id="of another run")


def plant_row_twice(books):
    rows = books.evidence.trained[0].rows
    books.change("trained", 0, rows=[*rows, rows[0]])


def plant_payloads_that_pile_up(books):
    books.change("trained", 1, num_payloads=49)


def plant_unadopted_turn(books):
    books.change_turns("g1", lambda number, old: msgspec.structs.replace(old, adopted=number == 0))


def plant_token_nobody_sampled(books):
    books.change_turns("g1", lambda number, old: msgspec.structs.replace(old, token_ids=[7, 9] if number else [7, 8]))


def plant_context_nobody_gave(books):
    books.change_turns("g1", lambda number, old: msgspec.structs.replace(old, context_ids=[5, 9] if number else [5, 6]))


def plant_call_trained_twice(books):
    for call in books.evidence.sampled:
        books.evidence.sampled[call] = 1


def plant_stale_token(books):
    books.change("windows", 1, policy_version=BOUND + 1)


def plant_token_of_the_future(books):
    books.change_turns("g1", lambda number, old: msgspec.structs.replace(old, versions=[1, 1]))


def plant_versions_that_go_back(books):
    books.change_turns("g2", lambda number, old: msgspec.structs.replace(old, versions=[1 - number] * 2))


def plant_two_counted_results(books):
    books.evidence.results.append(books.evidence.results[1])


def plant_no_counted_result(books):
    books.change("results", 1, counted=False)


def plant_counted_result_of_an_old_attempt(books):
    books.change("results", 1, attempt=1)


def plant_counted_result_of_nobody(books):
    books.change("results", 1, rollout_id="g9.0")


def plant_two_leases_of_one_attempt(books):
    books.change("leases", 0, attempt=2)


def plant_overlapping_attempts(books):
    books.change("leases", 0, state="granted")


def plant_live_lease(books):
    books.change("leases", 1, state="granted")


def plant_lease_without_end(books):
    books.change("leases", 1, ended=None)


def plant_lost_acknowledged_result(books):
    books.change("results", 1, lease_id="another")


def plant_acknowledged_result_with_another_reward(books):
    books.change("acknowledged", 0, reward=0.5)


def plant_accepted_result_kept_as_refused(books):
    books.change("results", 1, counted=False, rollout_id=None)


def plant_deadly_task_trained(books):
    books.change("groups", 0, task=Task(task_id="deadly", data={}))


def plant_deadly_task_at_large(books):
    books.evidence.quarantined.clear()
    books.change("groups", 3, state="failed", task=Task(task_id="deadly", data={}))


def plant_quarantine_without_error(books):
    books.evidence.quarantined["deadly"] = [""]


def plant_audit(books):
    books.evidence.audit_violations.append("a row is wrong")


@pytest.mark.parametrize(
    ("plant", "message"),
    [
        (plant_consumed_twice, "group g1 says that update 1 consumed it, but windows [1, 2] hold it"),
        (plant_open_group, "group g3 is still complete"),
        (plant_dropped_without_reason, "group g4 is dropped without a reason"),
        (plant_unknown_group, "holds group g9, which was never opened"),
        (plant_missing_window, "the windows' updates are 1 in number, first out of order 2, not 1 to 2"),
        (plant_version_of_a_window, "update 2 was made on version 0"),
        (plant_short_window, "update 2 has 0 groups"),
        (plant_journal_twice, "the journal's updates are 3 in number, first out of order 2"),
        (plant_update_never_made, "update 2 was recorded, but never made"),
        (plant_update_skipped, "the actor made update 2 after update 0"),
        (plant_other_tokens, "was trained as other tokens than were sampled"),
        (plant_other_logprobs, "was trained with other log-probs than were recorded"),
        (plant_left_out_row, "the actor was not given segment g1.1"),
        (plant_foreign_row, "the actor was given segment of another run"),
        (plant_row_twice, "the actor was given a segment twice"),
        (plant_payloads_that_pile_up, "at update 2 the server held the payloads of 49 rows; 48 may be open"),
        (plant_unadopted_turn, "turn g1.0b is trained, but it is delivered, adopted: False"),
        (plant_token_nobody_sampled, "turn g1.0b is none of the engine's"),
        (plant_context_nobody_gave, "turn g1.0b is none of the engine's"),
        (plant_call_trained_twice, "an engine call that was made 1 times was trained"),
        (plant_stale_token, "update 2 on version 2 trains segment"),
        (plant_token_of_the_future, "update 1 on version 0 trains segment"),
        (plant_versions_that_go_back, "has versions that go back: [0, 1]"),
        (plant_two_counted_results, "rollout g1.0 is finished and has 2 results that count"),
        (plant_no_counted_result, "rollout g1.0 is finished and has 0 results that count"),
        (plant_counted_result_of_an_old_attempt, "rollout g1.0: attempt 1 counts, not 2"),
        (plant_counted_result_of_nobody, "a result counts for rollout g9.0, which is in no group"),
        (plant_two_leases_of_one_attempt, "rollout g1.0 has two leases of one attempt: [2, 2]"),
        (plant_overlapping_attempts, "rollout g1.0: attempt 1 is live, and so is a later one"),
        (plant_live_lease, "lease g1.0.2 of worker w is still live"),
        (plant_lease_without_end, "lease g1.0.2 is reported, but never ended"),
        (plant_lost_acknowledged_result, "a result of lease g1.0.2 was acknowledged and is not in the ledger"),
        (plant_acknowledged_result_with_another_reward, "lease g1.0.2 was acknowledged and is not in the ledger"),
        (plant_accepted_result_kept_as_refused, "a result of lease g1.0.2 was accepted, but is kept as refused"),
        (plant_deadly_task_trained, "task deadly kills its workers, but a group of it was trained"),
        (plant_deadly_task_at_large, "task deadly kills its workers and is not in quarantine"),
        (plant_quarantine_without_error, "task deadly is in quarantine without an error"),
        (plant_audit, "audit: a row is wrong"),
    ],
)
def test_a_planted_fault_is_found(books, plant, message):
    plant(books)
    assert [text for text in check(books.evidence) if message in text], check(books.evidence)
