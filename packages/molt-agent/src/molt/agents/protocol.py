"""The HTTP API between an agent worker and a trainer: version 1, under `/api/v1`.

Every body is JSON of one of these structs. Times are seconds relative to the moment a message is received, never
clock readings, so that the clocks of two machines need not agree.

    POST /api/v1/leases              LeaseRequest      -> LeaseReply       (long poll: waits up to wait_s)
    POST /api/v1/heartbeat           HeartbeatRequest  -> HeartbeatReply
    POST /api/v1/leases/{id}/result  ResultReport      -> ResultReply      (409: the attempt was fenced)
    POST /api/v1/leases/{id}/release ReleaseRequest    -> ResultReply      (the worker gives the lease back unrun)
    POST /api/v1/sessions            SessionRequest    -> SessionReply     (201)
    POST /api/v1/sessions/{id}/result SessionResult    -> ResultReply

Errors of the API are `ErrorReply` bodies with a 4xx or 5xx status. A 503 with `retry-after` says that the server is
there and asks its clients to wait.
"""

from typing import Any, Literal

import msgspec

API_VERSION = 1
API_PREFIX = f"/api/v{API_VERSION}"
MIN_SESSION_KEY_BYTES = 16

OutcomeKind = Literal["completed", "failed", "infrastructure", "timeout", "truncated"]
"""How a rollout ended.

`completed`: the agent returned a Result. `truncated`: it returned one, but the episode was cut (turn or token limit).
`failed`: the agent raised, or its reward was no finite number. `infrastructure`: sandbox, network or engine was at
fault. `timeout`: the rollout passed its deadline.
"""


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """How the policy samples: what the agent should pass on to its SDK, and what the gateway enforces."""

    max_tokens: int = 1024
    temperature: float = 1.0
    top_p: float = 1.0
    stop: tuple[str, ...] = ()


class SessionCredentials(msgspec.Struct, frozen=True, kw_only=True):
    """Where one rollout's model calls go. `base_url` is `session_url + "/v1"`."""

    session_id: str
    session_url: str
    base_url: str
    api_key: str
    model_name: str


class Lease(msgspec.Struct, frozen=True, kw_only=True):
    """One attempt at one rollout, owned by one worker until it reports, releases, or stops heartbeating."""

    lease_id: str
    rollout_id: str
    group_id: str
    attempt: int
    """1 for the first attempt."""
    task: dict[str, Any]
    """The task row as given."""
    session: SessionCredentials
    sampling_params: SamplingParams
    timeout_s: float
    """Seconds, from receipt, that the rollout may take."""


class LeaseRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Ask for up to `capacity` leases, waiting up to `wait_s` seconds for the first."""

    worker_id: str
    capacity: int
    wait_s: float = 20.0
    labels: dict[str, str] = msgspec.field(default_factory=dict[str, str])
    """What the worker has; a task that names labels goes only to workers that have them all, with these values."""
    concurrency: int = 0
    """Rollouts that the worker runs at once, busy slots included; 0: unknown."""
    request_id: str = ""
    """The same in every try of one request. Leases that were granted to an earlier try did not arrive, and are taken
    back. Empty: nothing is known of earlier tries."""


class LeaseReply(msgspec.Struct, frozen=True, kw_only=True):
    """Leases granted (possibly none), and how often to heartbeat. `finished` tells the worker that the run is over."""

    leases: tuple[Lease, ...]
    heartbeat_s: float
    finished: bool = False


class HeartbeatRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The leases that a worker still holds."""

    worker_id: str
    lease_ids: tuple[str, ...]


class HeartbeatReply(msgspec.Struct, frozen=True, kw_only=True):
    """Of those named, the leases that the worker no longer owns; it should stop running them."""

    lost: tuple[str, ...]
    finished: bool = False
    """The run is over: no result is waited for any more."""


class ResultReport(msgspec.Struct, frozen=True, kw_only=True):
    """How an attempt ended. `reward` is finite for `completed` and `truncated`, else None."""

    worker_id: str
    attempt: int
    outcome: OutcomeKind
    reward: float | None = None
    score: float | None = None
    """What to evaluate by, where it differs from the reward."""
    error: str | None = None
    info: dict[str, Any] = msgspec.field(default_factory=dict[str, Any])
    answer: Any = None
    """What was graded, so that it can be graded again; None where the agent graded itself."""


class ReleaseRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Give a lease back unrun; the rollout is offered again at once."""

    worker_id: str
    attempt: int


class ResultReply(msgspec.Struct, frozen=True, kw_only=True):
    """Whether the report counts; when it does not, why (it is stored all the same)."""

    accepted: bool
    reason: str | None = None
    repeated: bool = False
    """An earlier report of the same attempt was accepted: that one counts."""
    finished: bool = False
    """The run is over: no result is waited for any more."""


class SessionRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Open a session for an agent that no worker drives. Every field is optional."""

    sampling_policy: Literal["enforce", "default", "client"] | None = None
    sampling_params: SamplingParams | None = None
    metadata: dict[str, Any] = msgspec.field(default_factory=dict[str, Any])
    task: dict[str, Any] | None = None
    group: str | None = None
    """Sessions of one key are rollouts of one prompt."""


class SessionReply(SessionCredentials, frozen=True, kw_only=True):
    """The credentials of a new session."""


class SessionResult(msgspec.Struct, frozen=True, kw_only=True):
    """The reward, or the typed outcome, of a session that no worker drives."""

    outcome: OutcomeKind = "completed"
    reward: float | None = None
    score: float | None = None
    error: str | None = None
    info: dict[str, Any] = msgspec.field(default_factory=dict[str, Any])


class ErrorDetail(msgspec.Struct, frozen=True, kw_only=True):
    """What was wrong: a stable `type`, one clear sentence, and the field at fault."""

    type: str
    message: str
    param: str | None = None


class ErrorReply(msgspec.Struct, frozen=True, kw_only=True):
    """The one error body of the control API."""

    error: ErrorDetail
