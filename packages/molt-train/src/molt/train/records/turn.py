"""Stage 3, capture: one model call as the gateway recorded it."""

from typing import Any, Literal

import msgspec

Wire = Literal["chat", "responses", "messages", "completions"]
TurnStatus = Literal["delivered", "undelivered", "aborted", "failed"]


class Turn(msgspec.Struct, frozen=True, kw_only=True):
    """One model call. The token row of a turn is: its parent's whole row, then `context_ids`, then `token_ids`.

    `token_ids`, `logprobs` and `versions` have one length, the number of sampled tokens, the end token included when
    the engine sampled it.
    """

    turn_id: str
    session_id: str
    wire: Wire
    parent_turn_id: str | None
    """The turn whose row this one extends; None when it opens a segment."""
    opened_by: str | None
    """Why the turn opened a segment (`start`, `history_rewritten`, `system_changed`, ...); None when it extends one."""
    response_id: str
    status: TurnStatus
    adopted: bool
    """A later request's history contains this turn, or it is the last one of its path."""
    auxiliary: bool
    """A side call (title generator and the like), not trained by default."""
    finish_reason: str
    prompt_length: int
    """Tokens that the engine was given: the parent's row plus `context_ids`."""
    context_ids: list[int]
    token_ids: list[int]
    logprobs: list[float]
    """Natural-log probability of each sampled token under the distribution it was sampled from."""
    versions: list[int]
    """Policy version that sampled each token."""
    sampling: dict[str, Any] = msgspec.field(default_factory=dict[str, Any])
    """The sampling parameters that the engine really used, the grammar included."""
    off_policy: list[str] = []
    """Parameters that changed the distribution in a way that no recorded log-prob corrects: penalties, logit bias,
    truncation other than the run's, grammar, greedy decoding. Such a turn is not trained by default."""
    client: dict[str, str] = {}
    """What the client's headers said of itself (agent, thread, turn): for attribution, never for access."""
