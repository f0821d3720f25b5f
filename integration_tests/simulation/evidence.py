"""What a simulation leaves behind: the run's ledger and journal, and what workers, engine and actor wrote down."""

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from integration_tests.simulation.api import Acknowledgement
from integration_tests.simulation.scenario import DEADLY
from molt.train.audit import audit
from molt.train.config import Config, load_config
from molt.train.observe.journal import read_journal
from molt.train.pool.reader import LedgerReader
from molt.train.pool.rows import GroupRow, LeaseRow, ResultRow, RolloutRow, WindowRow


class TrainedRow(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """A row that the actor was given: only what it trains."""

    segment_id: str
    token_ids: list[int]
    logprobs: list[float]
    versions: list[int]


class TrainedWindow(msgspec.Struct, frozen=True, kw_only=True):
    """An update that the actor made."""

    step: int
    policy_version: int
    rows: list[TrainedRow]
    num_payloads: int
    """Payloads of all rows, trained or waiting, that the server held then."""


class _EngineCall(msgspec.Struct):
    prompt_token_ids: list[int]
    token_ids: list[int]
    logprobs: list[float]
    version: int


@dataclass
class Evidence:
    """All that `check` looks at."""

    config: Config
    groups: list[GroupRow]
    rollouts_of: Callable[[str], Sequence[RolloutRow]]
    """The members of a group, with recordings; read when asked for, since all together they are large."""
    windows: list[WindowRow]
    leases: list[LeaseRow]
    results: list[ResultRow]
    journal: list[dict[str, Any]]
    acknowledged: list[Acknowledgement]
    trained: list[TrainedWindow]
    """In the order in which the actor made them; after a restart some are made again."""
    sampled: Counter[bytes]
    """The engine's calls, by `fingerprint`."""
    quarantined: dict[str, list[str]] = field(default_factory=dict[str, list[str]])
    deadly_tasks: frozenset[str] = frozenset()
    audit_violations: list[str] = field(default_factory=list[str])

    def figures(self) -> dict[str, Any]:
        """What the run came to."""
        states = Counter(group.state for group in self.groups)
        reasons = Counter((group.reason or "").partition(":")[0][:40] for group in self.groups if group.reason)
        return {
            "updates": len(self.windows),
            "groups": dict(states),
            "reasons": dict(reasons.most_common(8)),
            "results": len(self.results),
            "results_counted": sum(result.counted for result in self.results),
            "outcomes": dict(Counter(result.outcome.kind for result in self.results if result.counted)),
            "leases": dict(Counter(lease.state for lease in self.leases)),
            "acknowledged": len(self.acknowledged),
            "updates_made_again": len(self.trained) - len({window.step for window in self.trained}),
            "engine_calls": self.sampled.total(),
            "quarantined": sorted(self.quarantined),
        }


def fingerprint(prompt: Sequence[int], sampled: Sequence[int], logprobs: Sequence[float], version: int) -> bytes:
    """Of an engine call: what went in, what came out, and which policy it was."""
    return hashlib.blake2b(msgspec.msgpack.encode((prompt, sampled, logprobs, version)), digest_size=12).digest()


def read_evidence(folder: Path) -> Evidence:
    """Read what a simulation left in `folder`."""
    run = folder / "run"
    reader = LedgerReader.open(run / "ledger.db")
    report = audit(run)
    return Evidence(
        config=load_config(run / "config.toml", [], Config),
        groups=list(reader.groups()),
        rollouts_of=reader.rollouts,
        windows=reader.windows(),
        leases=list(reader.leases()),
        results=list(reader.results()),
        journal=read_journal(run / "metrics.jsonl"),
        acknowledged=list(_lines(folder / "acknowledged.jsonl", Acknowledgement)),
        trained=list(_lines(folder / "trained.jsonl", TrainedWindow)),
        sampled=Counter(
            fingerprint(call.prompt_token_ids, call.token_ids, call.logprobs, call.version)
            for path in sorted(folder.glob("engine-*.jsonl"))
            for call in _lines(path, _EngineCall)
        ),
        quarantined=reader.quarantined(),
        deadly_tasks=frozenset({DEADLY}),
        audit_violations=report.violations or ([] if report.passed else ["it did not pass"]),
    )


def _lines(path: Path, kind: type[Any]) -> Iterator[Any]:
    """The lines of a file that processes were killed over while they wrote it: what is no whole line is no line."""
    for line in path.read_bytes().split(b"\n"):
        try:
            yield msgspec.json.decode(line, type=kind)
        except msgspec.DecodeError:
            continue
