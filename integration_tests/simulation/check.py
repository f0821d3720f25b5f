"""The checker: does the evidence of a run balance? Nothing here comes from the code that it checks but the records."""

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence

from integration_tests.simulation.evidence import Evidence, TrainedRow, TrainedWindow, fingerprint
from molt.train.pool.rows import LeaseRow, ResultRow, RolloutRow, WindowRow
from molt.train.records.recording import Recording
from molt.train.records.trajectory import Segment
from molt.train.records.turn import Turn

MAX_VIOLATIONS = 200


def check(evidence: Evidence) -> list[str]:
    """Every violation found, at most `MAX_VIOLATIONS`; empty when the books balance."""
    found: list[str] = []
    for part in (
        groups_are_settled,
        windows_follow_each_other,
        trained_tokens_are_sampled_tokens,
        trained_rows_are_let_go_of,
        rollouts_have_one_result,
        leases_have_holders,
        acknowledged_results_are_kept,
        deadly_tasks_are_quarantined,
    ):
        for violation in part(evidence):
            found.append(f"{part.__name__}: {violation}")
            if len(found) >= MAX_VIOLATIONS:
                return found
    return found + [f"audit: {violation}" for violation in evidence.audit_violations]


def groups_are_settled(evidence: Evidence) -> Iterator[str]:
    """Every group is consumed by exactly one window, or failed or dropped with a reason."""
    windows: defaultdict[str, list[int]] = defaultdict(list)
    for window in evidence.windows:
        for group_id in window.group_ids:
            windows[group_id].append(window.step)
    known = set[str]()
    for group in evidence.groups:
        known.add(group.group_id)
        steps = windows.get(group.group_id, [])
        if group.state == "consumed":
            if steps != [group.step]:
                yield f"group {group.group_id} says that update {group.step} consumed it, but windows {steps} hold it"
        elif group.state in ("failed", "dropped"):
            if steps:
                yield f"group {group.group_id} is {group.state}, but windows {steps} hold it"
            if not group.reason:
                yield f"group {group.group_id} is {group.state} without a reason"
        else:
            yield f"group {group.group_id} is still {group.state}"
    for group_id in windows.keys() - known:
        yield f"window {windows[group_id]} holds group {group_id}, which was never opened"


def windows_follow_each_other(evidence: Evidence) -> Iterator[str]:
    """Steps and versions rise by one; each window is full, journaled once, and was trained as its version says."""
    steps = [window.step for window in evidence.windows]
    if steps != list(range(1, evidence.config.train.num_updates + 1)):
        yield f"the windows' updates are {_gaps(steps)}, not 1 to {evidence.config.train.num_updates}"
    for window in evidence.windows:
        if window.policy_version != window.step - 1:
            yield f"update {window.step} was made on version {window.policy_version}"
        if len(window.group_ids) != evidence.config.train.groups_per_update:
            yield f"update {window.step} has {len(window.group_ids)} groups"
    journaled = [row["step"] for row in evidence.journal]
    if journaled != steps:
        yield f"the journal's updates are {_gaps(journaled)}"
    for made in evidence.trained:
        if made.policy_version != made.step - 1:
            yield f"the actor made update {made.step} on version {made.policy_version}"
    for earlier, later in zip(evidence.trained, evidence.trained[1:], strict=False):
        # Only a restart goes back, to an update that was made before.
        if later.step > earlier.step + 1:
            yield f"the actor made update {later.step} after update {earlier.step}"


def trained_tokens_are_sampled_tokens(evidence: Evidence) -> Iterator[str]:
    """The actor was given, each time, the sampled tokens of the adopted turns of the window, and no others."""
    made: defaultdict[int, list[TrainedWindow]] = defaultdict(list)
    for trained in evidence.trained:
        made[trained.step].append(trained)
    used = Counter[bytes]()
    for window in evidence.windows:
        expected: dict[str, TrainedRow] = {}
        for group_id in window.group_ids:
            for segment, recording in _trained_segments(evidence, group_id):
                row, problems = _rebuild(segment, recording, evidence, used)
                yield from (f"update {window.step}, group {group_id}: {problem}" for problem in problems)
                yield from _stale(row, window, evidence.config.train.max_staleness)
                if segment.segment_id in expected:
                    yield f"update {window.step}: segment {segment.segment_id} twice"
                expected[segment.segment_id] = row
        if not made[window.step]:
            yield f"update {window.step} was recorded, but never made"
        for trained in made[window.step]:
            yield from _differences(trained, expected)
    for call, times in used.items():
        if times > evidence.sampled[call]:
            yield f"an engine call that was made {evidence.sampled[call]} times was trained {times} times"


def trained_rows_are_let_go_of(evidence: Evidence) -> Iterator[str]:
    """What the server holds does not grow with what it has trained.

    At most the groups that admission lets be outstanding, and the window in work, of two segments a rollout: most have
    one, and a resend that was sampled anew makes another.
    """
    train, rollout = evidence.config.train, evidence.config.rollout
    bound = 2 * (train.max_staleness + 2) * train.groups_per_update * (rollout.group_size + rollout.oversample)
    for made in evidence.trained:
        if made.num_payloads > bound:
            yield f"at update {made.step} the server held the payloads of {made.num_payloads} rows; {bound} may be open"


def rollouts_have_one_result(evidence: Evidence) -> Iterator[str]:
    """A finished rollout has one result that counts, of its last attempt; any other has none. Attempts do not overlap.

    An attempt begins when the one before it is over, so their numbers say that two never count at once.
    """
    counted: defaultdict[str, list[ResultRow]] = defaultdict(list)
    for result in evidence.results:
        if result.counted and result.rollout_id is not None:
            counted[result.rollout_id].append(result)
    leases: defaultdict[str, list[LeaseRow]] = defaultdict(list)
    for lease in evidence.leases:
        leases[lease.rollout_id].append(lease)
    for group in evidence.groups:
        for rollout in evidence.rollouts_of(group.group_id):
            yield from _attempts(rollout, sorted(leases[rollout.rollout_id], key=lambda lease: lease.attempt))
            yield from _results(rollout, counted.pop(rollout.rollout_id, []))
    for rollout_id in counted:
        yield f"a result counts for rollout {rollout_id}, which is in no group"


def leases_have_holders(evidence: Evidence) -> Iterator[str]:
    """At the end nobody holds a lease, so none may be live."""
    for lease in evidence.leases:
        if lease.state == "granted":
            yield f"lease {lease.lease_id} of worker {lease.worker_id} is still live"
        elif lease.ended is None:
            yield f"lease {lease.lease_id} is {lease.state}, but never ended"


def acknowledged_results_are_kept(evidence: Evidence) -> Iterator[str]:
    """What a worker was told is in the ledger: an accepted result as it was reported, a refused one at least kept."""
    kept: defaultdict[str, list[ResultRow]] = defaultdict(list)
    for result in evidence.results:
        if result.lease_id is not None:
            kept[result.lease_id].append(result)
    for said in evidence.acknowledged:
        rows = [
            row
            for row in kept[said.lease_id]
            if (row.attempt, row.outcome.kind, row.outcome.reward) == (said.attempt, said.outcome, said.reward)
        ]
        if not rows:
            yield f"a result of lease {said.lease_id} was acknowledged and is not in the ledger"
        elif said.accepted and not any(row.counted or row.rollout_id is not None for row in rows):
            yield f"a result of lease {said.lease_id} was accepted, but is kept as refused"
    for lease_id, rows in kept.items():
        if sum(row.counted for row in rows) > 1:
            yield f"lease {lease_id} has more than one result that counts"


def deadly_tasks_are_quarantined(evidence: Evidence) -> Iterator[str]:
    """A task that kills its attempts is never trained, and out, with the errors, when it has failed more than once.

    One failure alone says little: when nothing else finished meanwhile, it looks like an outage.
    """
    for task_id in evidence.deadly_tasks:
        states = [group.state for group in evidence.groups if group.task.task_id == task_id]
        if states.count("failed") > 1 and not evidence.quarantined.get(task_id):
            yield f"task {task_id} kills its workers and is not in quarantine"
        if "consumed" in states:
            yield f"task {task_id} kills its workers, but a group of it was trained"
    for task_id, errors in evidence.quarantined.items():
        if not any(errors):
            yield f"task {task_id} is in quarantine without an error"


def _trained_segments(evidence: Evidence, group_id: str) -> Iterator[tuple[Segment, Recording]]:
    """The segments of a consumed group that were to be trained: a rollout that is alone has nothing to compare with."""
    pool = evidence.config.pool
    members = [row for row in evidence.rollouts_of(group_id) if row.outcome and pool.counts(row.outcome.kind)]
    if len(members) < 2:
        return
    for row in members:
        for segment in row.recording.segments if row.recording else []:
            if segment.trained:
                assert row.recording is not None
                yield segment, row.recording


def _rebuild(
    segment: Segment, recording: Recording, evidence: Evidence, used: Counter[bytes]
) -> tuple[TrainedRow, list[str]]:
    """What the turns of a segment say that it trains, and what is wrong with it. Counts the engine calls in `used`."""
    turns = {turn.turn_id: turn for turn in recording.turns}
    problems: list[str] = []
    row: list[int] = []
    trained: tuple[list[int], list[float], list[int]] = ([], [], [])
    for turn_id in segment.turn_ids:
        turn = turns[turn_id]
        prompt = row + turn.context_ids
        mask = segment.action_mask[len(prompt) : len(prompt) + len(turn.token_ids)]
        row = prompt + turn.token_ids
        if not any(mask):
            continue
        if not all(mask) or not turn.adopted or turn.status != "delivered":
            problems.append(f"turn {turn_id} is trained, but it is {turn.status}, adopted: {turn.adopted}, or cut")
        if versions := _not_one(turn):
            problems.append(f"turn {turn_id} has versions {versions}")
        for values, more in zip(trained, (turn.token_ids, turn.logprobs, turn.versions), strict=True):
            values += more
        call = fingerprint(prompt, turn.token_ids, turn.logprobs, turn.versions[0])
        if not evidence.sampled[call]:
            problems.append(f"turn {turn_id} is none of the engine's")
        used[call] += 1
    if row != segment.token_ids:
        problems.append(f"segment {segment.segment_id} is not the tokens of its turns")
    if sum(segment.action_mask) != len(trained[0]):
        problems.append(f"segment {segment.segment_id} trains a token that nobody sampled")
    made = TrainedRow(segment_id=segment.segment_id, token_ids=trained[0], logprobs=trained[1], versions=trained[2])
    return made, problems


def _not_one(turn: Turn) -> set[int]:
    """The versions of a turn where they are not one: the simulated engine samples a turn by one policy."""
    versions = set(turn.versions)
    return set() if len(versions) == 1 else versions


def _stale(row: TrainedRow, window: WindowRow, bound: int) -> Iterator[str]:
    for version in sorted(set(row.versions)):
        if not window.policy_version - bound <= version <= window.policy_version:
            yield (
                f"update {window.step} on version {window.policy_version} trains segment {row.segment_id} of version "
                f"{version}; the bound is {bound}"
            )
    if row.versions != sorted(row.versions):
        yield f"segment {row.segment_id} has versions that go back: {sorted(set(row.versions))}"


def _differences(trained: TrainedWindow, expected: dict[str, TrainedRow]) -> Iterator[str]:
    given = {row.segment_id: row for row in trained.rows}
    if len(given) != len(trained.rows):
        yield f"update {trained.step}: the actor was given a segment twice"
    for segment_id in given.keys() ^ expected.keys():
        which = "was given" if segment_id in given else "was not given"
        yield f"update {trained.step}: the actor {which} segment {segment_id}"
    for segment_id in given.keys() & expected.keys():
        mine, theirs = expected[segment_id], given[segment_id]
        if (mine.token_ids, mine.versions) != (theirs.token_ids, theirs.versions):
            yield f"update {trained.step}: segment {segment_id} was trained as other tokens than were sampled"
        elif any(abs(a - b) > 1e-6 for a, b in zip(mine.logprobs, theirs.logprobs, strict=True)):
            yield f"update {trained.step}: segment {segment_id} was trained with other log-probs than were recorded"


def _attempts(rollout: RolloutRow, leases: Sequence[LeaseRow]) -> Iterator[str]:
    numbers = [lease.attempt for lease in leases]
    if len(set(numbers)) != len(numbers):
        yield f"rollout {rollout.rollout_id} has two leases of one attempt: {numbers}"
    if rollout.state == "finished" and numbers and rollout.attempt != numbers[-1]:
        yield f"rollout {rollout.rollout_id} finished in attempt {rollout.attempt}, but {numbers[-1]} was leased"
    for lease in leases[:-1]:
        if lease.state == "granted":
            yield f"rollout {rollout.rollout_id}: attempt {lease.attempt} is live, and so is a later one"


def _results(rollout: RolloutRow, results: Sequence[ResultRow]) -> Iterator[str]:
    wanted = 1 if rollout.state == "finished" else 0
    if len(results) != wanted:
        yield f"rollout {rollout.rollout_id} is {rollout.state} and has {len(results)} results that count"
    for result in results:
        if result.attempt != rollout.attempt:
            yield f"rollout {rollout.rollout_id}: attempt {result.attempt} counts, not {rollout.attempt}"


def _gaps(steps: Sequence[int]) -> str:
    """A list of updates, in short."""
    wrong = [step for index, step in enumerate(steps, 1) if step != index]
    return f"{len(steps)} in number, first out of order {wrong[0]}" if wrong else f"1 to {len(steps)}"
