"""Stage 4, trajectory: the linear token rows of one rollout."""

import msgspec


class Segment(msgspec.Struct, frozen=True, kw_only=True):
    """One linear token sequence. The four lists have one length: the number of tokens of the row.

    `action_mask` is 1 where the policy sampled the token and this segment trains it; a token that several segments
    share is an action only in the first. `logprobs` is 0.0 and `versions` None where nothing was sampled.
    """

    segment_id: str
    turn_ids: list[str]
    opened_by: str
    token_ids: list[int]
    action_mask: list[int]
    logprobs: list[float]
    versions: list[int | None]
    trained: bool
    untrained_reason: str | None = None
    """Why the segment is not trained (`auxiliary`, `not_adopted`, `off_policy`, `no_actions`, ...)."""


class Trajectory(msgspec.Struct, frozen=True, kw_only=True):
    """Everything sampled in one session, as segments, with the counters of what was forked, dropped or ignored."""

    session_id: str
    segments: list[Segment]
    counters: dict[str, int]
