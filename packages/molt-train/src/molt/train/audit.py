"""`molt-train audit`: prove from the ledger that every trained token was sampled in exactly its row's context.

Nothing is taken from the code that built the rows: each row is put together again from the recorded turns and compared.
A folder without updates, such as the gateway's, is looked at session by session: what would be trained. Recordings that
their payload files do not hold any more are found by their checksums, and the rest is looked at all the same.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from molt.train.config import Config, load_config
from molt.train.errors import ConfigError, PayloadDamagedError
from molt.train.observe.journal import read_journal
from molt.train.pool.reader import LedgerReader
from molt.train.pool.rows import RolloutRow, WindowRow
from molt.train.records.recording import Recording
from molt.train.records.trajectory import Segment
from molt.train.records.turn import Turn

MAX_VIOLATIONS = 100


@dataclass
class AuditReport:
    """What was looked at, and every violation found (at most `MAX_VIOLATIONS` are listed)."""

    passed: bool = True
    num_updates: int = 0
    num_rollouts: int = 0
    num_segments: int = 0
    num_trained_tokens: int = 0
    delivered_fraction: float = 1.0
    """Sampled tokens that reached the client, over all sampled tokens of the rollouts trained on."""
    forks: dict[str, int] = field(default_factory=dict[str, int])
    """Segments by the reason that opened them."""
    untrained: dict[str, int] = field(default_factory=dict[str, int])
    """Segments that train nothing, by reason."""
    keep_stale_cache: bool = False
    """Prompts found keys and values of older weights, as `engine.keep_stale_cache` allows: recorded log-probs are those
    of the weights that a token's version names on top of a cache that may be older."""
    violations: list[str] = field(default_factory=list[str])

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)

    def violation(self, text: str) -> None:
        """Record one."""
        self.passed = False
        if len(self.violations) < MAX_VIOLATIONS:
            self.violations.append(text)


@dataclass
class _Seen:
    """What was looked at, until it is counted."""

    num_sampled: int = 0
    num_delivered: int = 0
    forks: Counter[str] = field(default_factory=Counter[str])
    untrained: Counter[str] = field(default_factory=Counter[str])

    def add(self, recording: Recording) -> None:
        """Count one recording."""
        self.num_sampled += sum(len(turn.token_ids) for turn in recording.turns)
        self.num_delivered += sum(len(turn.token_ids) for turn in recording.turns if turn.status == "delivered")
        self.forks.update(segment.opened_by for segment in recording.segments)
        self.untrained.update(s.untrained_reason or "" for s in recording.segments if not s.trained)

    def finish(self, report: AuditReport) -> AuditReport:
        """Write the counts into `report`."""
        report.delivered_fraction = self.num_delivered / self.num_sampled if self.num_sampled else 1.0
        report.forks, report.untrained = dict(self.forks), dict(self.untrained)
        return report


def audit(run_dir: Path) -> AuditReport:
    """Check every window of the run in `run_dir`. Raises ConfigError when there is none."""
    ledger_file = run_dir / "ledger.db"
    if not ledger_file.is_file():
        raise ConfigError(f"{str(run_dir)!r} holds no run: there is no {ledger_file.name} in it")
    config = load_config(run_dir / "config.toml", [], Config)
    reader = LedgerReader.open(ledger_file)
    try:
        report = AuditReport(keep_stale_cache=config.engine.keep_stale_cache)
        for _, error in reader.damaged():
            report.violation(str(error))
        if windows := reader.windows():
            return _audit_updates(windows, reader, config, run_dir / "metrics.jsonl", report)
        return audit_recordings(reader.recordings(on_damage=_known), config, report)
    finally:
        reader.close()


def _known(error: PayloadDamagedError) -> None:
    """Every damaged recording is in the report before anything else is."""


def audit_recordings(recordings: Iterable[Recording], config: Config, report: AuditReport | None = None) -> AuditReport:
    """Check sessions by themselves, as no update has consumed them. `num_rollouts` counts sessions."""
    report, seen = report or AuditReport(), _Seen()
    for recording in recordings:
        report.num_rollouts += 1
        report.num_trained_tokens += _num_actions(recording)
        seen.add(recording)
        _audit_rows(recording, None, config, report, f"session {recording.session_id}")
    return seen.finish(report)


def _audit_updates(
    windows: Sequence[WindowRow], reader: LedgerReader, config: Config, journal: Path, report: AuditReport
) -> AuditReport:
    seen = _Seen()
    recorded = {row["step"]: row["num_action_tokens"] for row in read_journal(journal)}
    consumed: Counter[str] = Counter()
    for window in windows:
        report.num_updates += 1
        consumed.update(window.group_ids)
        trained = 0
        for group_id in window.group_ids:
            for row in reader.each_rollout(group_id, on_damage=_known):
                trained += _audit_rollout(row, window, config, report)
                if row.recording is not None:
                    seen.add(row.recording)
        report.num_trained_tokens += trained
        if recorded.get(window.step, trained) != trained:
            report.violation(
                f"update {window.step}: {recorded[window.step]} action tokens were trained, "
                f"but the recordings hold {trained}"
            )
    for group_id, count in consumed.items():
        if count > 1:
            report.violation(f"group {group_id} was consumed by {count} windows")
    return seen.finish(report)


def _audit_rollout(row: RolloutRow, window: WindowRow, config: Config, report: AuditReport) -> int:
    """Check one rollout; returns how many of its tokens were trained."""
    if row.state == "cut":
        return 0
    report.num_rollouts += 1
    if row.outcome is None:
        report.violation(f"rollout {row.rollout_id} was consumed by update {window.step} without a result")
        return 0
    if row.recording is None:
        # A lease that expired has none, and trains nothing.
        if config.pool.counts(row.outcome.kind):
            report.violation(f"rollout {row.rollout_id} was consumed by update {window.step} without a recording")
        return 0
    _audit_rows(row.recording, window, config, report, f"rollout {row.rollout_id}")
    return _num_actions(row.recording) if config.pool.counts(row.outcome.kind) else 0


def _audit_rows(recording: Recording, window: WindowRow | None, config: Config, report: AuditReport, name: str) -> None:
    turns = {turn.turn_id: turn for turn in recording.turns}
    trained: Counter[str] = Counter()
    for segment in recording.segments:
        report.num_segments += 1
        problems = list(_audit_shape(segment, turns)) or [
            *_audit_segment(segment, turns, trained, config),
            *_audit_versions(segment, window, config.train.max_staleness),
        ]
        for problem in problems:
            report.violation(f"{name}, segment {segment.segment_id}: {problem}")
    for turn_id, count in trained.items():
        if count > 1:
            report.violation(f"{name}: turn {turn_id} is trained by {count} segments")


def _num_actions(recording: Recording) -> int:
    return sum(sum(segment.action_mask) for segment in recording.segments if segment.trained)


def _audit_shape(segment: Segment, turns: dict[str, Turn]) -> Iterator[str]:
    """What keeps a row from being looked at any closer."""
    for turn_id in segment.turn_ids:
        if turn_id not in turns:
            yield f"turn {turn_id} is not in the recording"
    row = (segment.token_ids, segment.action_mask, segment.logprobs, segment.versions)
    if len({len(values) for values in row}) > 1:
        yield f"its tokens, actions, log-probs and versions have lengths {[len(values) for values in row]}"


def _audit_segment(segment: Segment, turns: dict[str, Turn], trained: Counter[str], config: Config) -> Iterator[str]:
    """Rebuild the row from its turns. Counts in `trained` the turns whose tokens are actions here."""
    path = [turns[turn_id] for turn_id in segment.turn_ids]
    for parent, child in zip([None, *path], path, strict=False):
        if child.parent_turn_id != (parent.turn_id if parent else None):
            yield f"turn {child.turn_id} does not continue the turn before it"
    row: list[int] = []
    for turn in path:
        row += turn.context_ids
        if len(row) != turn.prompt_length:
            yield f"turn {turn.turn_id} was sampled after {turn.prompt_length} tokens, but its row has {len(row)} there"
        start, end = len(row), len(row) + len(turn.token_ids)
        row += turn.token_ids
        actions = segment.action_mask[start:end]
        if any(actions):
            trained[turn.turn_id] += 1
            yield from _audit_trainable(turn, config)
            yield from _audit_actions(segment, turn, start, actions)
    if row != segment.token_ids:
        yield "its tokens are not those of its turns"
    if sum(segment.action_mask) != sum(sum(segment.action_mask[a:b]) for a, b in _sampled(path)):
        yield "a token that no turn sampled is an action"


def _audit_trainable(turn: Turn, config: Config) -> Iterator[str]:
    rollout = config.rollout
    if turn.status != "delivered" or not turn.adopted:
        yield f"turn {turn.turn_id} is trained, but it was {turn.status}, adopted: {turn.adopted}"
    if turn.auxiliary and not rollout.train_auxiliary:
        yield f"turn {turn.turn_id} is trained, but it was a side call"
    off_policy, temperature = list(turn.off_policy), turn.sampling.get("temperature", rollout.temperature)
    if config.algorithm.correction == "none" and temperature != rollout.temperature:
        off_policy.append("temperature")
    if off_policy and not rollout.train_off_policy:
        yield f"turn {turn.turn_id} is trained, but it was sampled off-policy: {', '.join(off_policy)}"


def _audit_actions(segment: Segment, turn: Turn, start: int, actions: Sequence[int]) -> Iterator[str]:
    if not all(actions):
        yield f"turn {turn.turn_id} is trained in part"
    end = start + len(turn.token_ids)
    if segment.logprobs[start:end] != turn.logprobs:
        yield f"turn {turn.turn_id}: its log-probs are not the engine's"
    if segment.versions[start:end] != turn.versions:
        yield f"turn {turn.turn_id}: its policy versions are not the engine's"


def _audit_versions(segment: Segment, window: WindowRow | None, max_staleness: int) -> Iterator[str]:
    versions = [v for v, action in zip(segment.versions, segment.action_mask, strict=True) if action and v is not None]
    if len(versions) != sum(segment.action_mask):
        yield "an action has no policy version"
    if window is None:
        return
    if versions and window.policy_version - min(versions) > max_staleness:
        yield f"update {window.step} trained a token of version {min(versions)}: older than {max_staleness} versions"
    if versions and max(versions) > window.policy_version:
        yield f"update {window.step} trained a token of version {max(versions)}, which did not exist yet"


def _sampled(path: Sequence[Turn]) -> list[tuple[int, int]]:
    """Where each turn's sampled tokens stand in the row."""
    spans: list[tuple[int, int]] = []
    position = 0
    for turn in path:
        position += len(turn.context_ids)
        spans.append((position, position + len(turn.token_ids)))
        position = spans[-1][1]
    return spans
