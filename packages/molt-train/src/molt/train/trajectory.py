r"""Stage 4, trajectory: from the turn tree of a session to linear token rows.

    turns (a tree)          segments (its leaf paths)     trains
    A --- B --- C           A B C                         A, B, C
           \--- D           A B D                         D; A and B are context here
    E (opened a segment)    E                             E

Every row is what the engine saw and said, token for token, so each sampled token stands behind exactly the tokens it
was conditioned on. A turn that several rows share is trained in one of them.
"""

from collections import Counter
from collections.abc import Mapping, Sequence

import msgspec

from molt.train.config import Config
from molt.train.records.trajectory import Segment, Trajectory
from molt.train.records.turn import Turn


class TrainingRules(msgspec.Struct, frozen=True, kw_only=True):
    """Which of the turns that were delivered and adopted are trained."""

    auxiliary: bool = False
    """Side calls are."""
    off_policy: bool = False
    """Turns are that were sampled in a way that the loss cannot correct."""
    temperature: float | None = None
    """The only one that the loss can take, since it corrects for no other; None: any, since it does."""

    @classmethod
    def of(cls, config: Config) -> "TrainingRules":
        """As a run's configuration says."""
        return cls(
            auxiliary=config.rollout.train_auxiliary,
            off_policy=config.rollout.train_off_policy,
            temperature=config.rollout.temperature if config.algorithm.correction == "none" else None,
        )

    def untrained_reason(self, turn: Turn) -> str | None:
        """Why a turn is not trained; None where it is."""
        if turn.auxiliary and not self.auxiliary:
            return "auxiliary"
        if turn.status != "delivered":
            return turn.status
        if not turn.adopted:
            return "not_adopted"
        return "off_policy" if self._is_off_policy(turn) and not self.off_policy else None

    def _is_off_policy(self, turn: Turn) -> bool:
        if turn.off_policy:
            return True
        return self.temperature is not None and turn.sampling.get("temperature", self.temperature) != self.temperature


DEFAULT_RULES = TrainingRules()


def build_trajectory(session_id: str, turns: Sequence[Turn], rules: TrainingRules = DEFAULT_RULES) -> Trajectory:
    """Every leaf path of the turn tree as a segment, in the order of the leaves.

    A turn is trained when it was delivered, adopted, no side call and not off-policy, as `rules` has it. Its tokens are
    actions in the first segment that ends in a trained turn, or else in the first segment that holds it, and context in
    the others. A segment that trains nothing is kept, with the reason: that of its last turn, else `no_actions`.

    Counters, absent where zero: `turns`, `segments`, `opened_by.REASON` (roots), `forks` (leaf paths beyond one a
    root), `shared_tokens` (trained tokens repeated as context), `untrained_turns.REASON`, `untrained_tokens.REASON`.

    Args:
        session_id: Names the segments.
        turns: All turns of the session, each after its parent.
        rules: Which turns are trained.

    Raises:
        ValueError: A turn contradicts itself or the turns before it; the message names the turn.
    """
    by_id = _by_id(turns)
    parents = {turn.parent_turn_id for turn in turns}
    paths = [_path(turn, by_id) for turn in turns if turn.turn_id not in parents]
    untrained = {turn.turn_id: rules.untrained_reason(turn) for turn in turns}
    trained = _trained_turns(paths, untrained)
    segments = [
        _segment(f"{session_id}/{i}", path, trained[i], untrained[path[-1].turn_id]) for i, path in enumerate(paths)
    ]
    return Trajectory(session_id=session_id, segments=segments, counters=_counters(turns, paths, trained, untrained))


def delivered_fraction(turns: Sequence[Turn]) -> float:
    """Sampled tokens of delivered turns over all sampled tokens; 1.0 when nothing was sampled."""
    sampled = sum(len(turn.token_ids) for turn in turns)
    delivered = sum(len(turn.token_ids) for turn in turns if turn.status == "delivered")
    return delivered / sampled if sampled else 1.0


def _by_id(turns: Sequence[Turn]) -> dict[str, Turn]:
    by_id: dict[str, Turn] = {}
    for turn in turns:
        if turn.turn_id in by_id:
            raise ValueError(f"turn {turn.turn_id!r} is recorded twice")
        _check_turn(turn, by_id)
        by_id[turn.turn_id] = turn
    return by_id


def _check_turn(turn: Turn, earlier: dict[str, Turn]) -> None:
    name = f"turn {turn.turn_id!r}"
    lengths = (len(turn.token_ids), len(turn.logprobs), len(turn.versions))
    if len(set(lengths)) > 1:
        raise ValueError(f"{name}: token_ids, logprobs and versions have lengths {lengths}; they must be equal")
    parent_length = 0
    if turn.parent_turn_id is not None:
        parent = earlier.get(turn.parent_turn_id)
        if parent is None:
            raise ValueError(f"{name}: its parent {turn.parent_turn_id!r} is not among the turns before it")
        parent_length = parent.prompt_length + len(parent.token_ids)
    elif turn.opened_by is None:
        raise ValueError(f"{name} has no parent and no opened_by; a turn that opens a segment says why")
    if turn.prompt_length != parent_length + len(turn.context_ids):
        raise ValueError(
            f"{name}: prompt_length is {turn.prompt_length}, but its parent's row has {parent_length} tokens and its "
            f"context_ids {len(turn.context_ids)}; the prompt must be both"
        )


def _path(leaf: Turn, by_id: dict[str, Turn]) -> list[Turn]:
    path = [leaf]
    while (parent_id := path[-1].parent_turn_id) is not None:
        path.append(by_id[parent_id])
    return path[::-1]


def _trained_turns(paths: Sequence[Sequence[Turn]], untrained: Mapping[str, str | None]) -> list[set[str]]:
    """For each path, the turns that it trains. No turn is in two of the sets."""
    # Paths that end in a trained turn choose first: a rejected sibling must not be forwarded only for what it shares.
    order = sorted(range(len(paths)), key=lambda i: untrained[paths[i][-1].turn_id] is not None)
    trained: list[set[str]] = [set() for _ in paths]
    taken: set[str] = set()
    for i in order:
        trained[i] = {turn.turn_id for turn in paths[i] if untrained[turn.turn_id] is None} - taken
        taken |= trained[i]
    return trained


def _segment(segment_id: str, path: Sequence[Turn], trained_turns: set[str], last_untrained: str | None) -> Segment:
    token_ids: list[int] = []
    action_mask: list[int] = []
    logprobs: list[float] = []
    versions: list[int | None] = []
    for turn in path:
        num_context, num_sampled = len(turn.context_ids), len(turn.token_ids)
        token_ids += turn.context_ids + turn.token_ids
        action_mask += [0] * num_context + [int(turn.turn_id in trained_turns)] * num_sampled
        logprobs += [0.0] * num_context + turn.logprobs
        versions += [None] * num_context
        versions += turn.versions
    trained = any(action_mask)
    return Segment(
        segment_id=segment_id,
        turn_ids=[turn.turn_id for turn in path],
        opened_by=path[0].opened_by or "",
        token_ids=token_ids,
        action_mask=action_mask,
        logprobs=logprobs,
        versions=versions,
        trained=trained,
        untrained_reason=None if trained else last_untrained or "no_actions",
    )


def _counters(
    turns: Sequence[Turn],
    paths: Sequence[Sequence[Turn]],
    trained: Sequence[set[str]],
    untrained: Mapping[str, str | None],
) -> dict[str, int]:
    roots = [turn for turn in turns if turn.parent_turn_id is None]
    counters = Counter(f"opened_by.{turn.opened_by}" for turn in roots)
    counters.update(turns=len(turns), segments=len(paths), forks=len(paths) - len(roots))
    for turn in turns:
        if (reason := untrained[turn.turn_id]) is not None:
            counters[f"untrained_turns.{reason}"] += 1
            counters[f"untrained_tokens.{reason}"] += len(turn.token_ids)
    for path, trained_here in zip(paths, trained, strict=True):
        shared = (turn for turn in path if untrained[turn.turn_id] is None and turn.turn_id not in trained_here)
        counters["shared_tokens"] += sum(len(turn.token_ids) for turn in shared)
    return {name: count for name, count in counters.items() if count}
