"""What an agent reported and its session holds, as the records that the pool takes."""

import math
from collections.abc import Mapping, Sequence

import msgspec

from molt.agents.protocol import ResultReport, SessionResult
from molt.train.experience import offload_trained
from molt.train.gateway.sessions import Session
from molt.train.pool.groups import ExperiencesOf
from molt.train.records.experience import Experience, PayloadStore
from molt.train.records.recording import Recording, SessionState
from molt.train.records.rollout import Outcome
from molt.train.records.trajectory import Segment
from molt.train.records.turn import Turn
from molt.train.trajectory import TrainingRules, build_trajectory, delivered_fraction


def outcome_of(result: ResultReport | SessionResult) -> Outcome:
    """The outcome that counts: one that should have a finite reward and has none is `failed`, with the reason."""
    answer = result.answer if isinstance(result, ResultReport) else None
    outcome = Outcome(kind=result.outcome, error=result.error, info=result.info, answer=answer)
    if result.outcome not in ("completed", "truncated"):
        return outcome
    reason = None
    if result.reward is None:
        reason = f"outcome {result.outcome!r} without a reward"
    else:
        for name, value in (("reward", result.reward), ("score", result.score)):
            if value is not None and not math.isfinite(value):
                reason = f"{name} is {value}, which is no finite number"
    if reason is not None:
        return msgspec.structs.replace(outcome, kind="failed", error=reason)
    return msgspec.structs.replace(outcome, reward=result.reward, score=result.score)


def recording_of(session: Session, rules: TrainingRules) -> Recording:
    """What a session holds now, its turns assembled to segments, of which `rules` says what is trained."""
    return _recording(session.session_id, session.turns(), rules, state=session.state, counters=session.counters)


def recording_of_turns(session_id: str, turns: list[Turn], rules: TrainingRules) -> Recording:
    """What a session of a server that died had recorded."""
    return _recording(session_id, turns, rules, state="closed", counters={"rescued": 1})


def _recording(
    session_id: str, turns: list[Turn], rules: TrainingRules, *, state: SessionState, counters: Mapping[str, int]
) -> Recording:
    trajectory = build_trajectory(session_id, turns, rules)
    return Recording(
        session_id=session_id,
        state=state,
        turns=turns,
        segments=trajectory.segments,
        counters={**counters, **trajectory.counters},
        delivered_fraction=delivered_fraction(turns),
    )


def experiences_into(store: PayloadStore) -> ExperiencesOf:
    """What makes the experiences of a rollout's trained segments, with their payloads in `store`."""

    def experiences_of(segments: Sequence[Segment], rollout_id: str, group_id: str) -> tuple[Experience, ...]:
        return offload_trained(segments, store, rollout_id=rollout_id, group_id=group_id)

    return experiences_of
