"""Context: what an agent gets for one rollout, made from a lease."""

from collections.abc import Sequence
from typing import Any, cast

import msgspec

from molt.agents.errors import TaskError
from molt.agents.protocol import Lease, SamplingParams


class Context(msgspec.Struct, frozen=True, kw_only=True):
    """One rollout: its task, the model endpoint that records it, and its limits."""

    messages: tuple[Any, ...]
    """The task's chat messages, as dicts that any SDK takes; one user message where the row has only a `prompt`."""
    prompt: str
    """The text of the last user message; empty where there is none."""
    label: Any
    """The row's `label`: what to grade against."""
    tools: tuple[Any, ...]
    """The row's `tools`, in the OpenAI form."""
    images: tuple[str, ...]
    """The row's `images`: URLs, `data:` or `https:`."""
    data: dict[str, Any]
    """The task row as given."""
    sampling_params: SamplingParams
    model_name: str
    session_url: str
    """For SDKs that append `/v1/...` themselves, such as Anthropic's."""
    base_url: str
    """`session_url + "/v1"`, for SDKs of the OpenAI kind."""
    api_key: str
    """Valid for this rollout only."""
    session_id: str
    rollout_id: str
    attempt: int
    """1 for the first attempt."""
    deadline: float
    """When the rollout is cut off: seconds since the epoch by this machine's clock, comparable with `time.time()`."""

    def __repr__(self) -> str:  # the key stays out of logs
        return f"Context(rollout_id={self.rollout_id!r}, attempt={self.attempt}, prompt={self.prompt[:40]!r})"


def make_context(lease: Lease, *, deadline: float) -> Context:
    """Read the task row of `lease`.

    Raises:
        TaskError: `messages`, `prompt`, `tools` or `images` of the row has the wrong shape.
    """
    row, session = lease.task, lease.session
    images = tuple(_list_of(row, "images", str, "URLs"))
    messages = _messages(row, images)
    return Context(
        messages=messages,
        prompt=_last_user_text(messages),
        label=row.get("label"),
        tools=tuple(_list_of(row, "tools", dict, "objects")),
        images=images,
        data=row,
        sampling_params=lease.sampling_params,
        model_name=session.model_name,
        session_url=session.session_url,
        base_url=session.base_url,
        api_key=session.api_key,
        session_id=session.session_id,
        rollout_id=lease.rollout_id,
        attempt=lease.attempt,
        deadline=deadline,
    )


def user_message(text: str, images: Sequence[str] = ()) -> dict[str, Any]:
    """Make one user message in the OpenAI form; images come before the text."""
    if not images:
        return {"role": "user", "content": text}
    parts: list[dict[str, Any]] = [{"type": "image_url", "image_url": {"url": url}} for url in images]
    return {"role": "user", "content": [*parts, {"type": "text", "text": text}]}


def message_text(message: dict[str, Any]) -> str:
    """Give the text of a chat message, whether its content is a string, a list of parts, or null."""
    content = message.get("content")
    if not isinstance(content, list):
        return content if isinstance(content, str) else ""
    parts = cast("list[dict[str, Any]]", content)
    return "".join(part.get("text", "") for part in parts if part.get("type") == "text")


def _messages(row: dict[str, Any], images: tuple[str, ...]) -> tuple[Any, ...]:
    messages = _list_of(row, "messages", dict, "objects")
    for i, message in enumerate(messages):
        if not isinstance(message.get("role"), str):
            raise TaskError(f"task row: messages[{i}] has no `role`")
    prompt = row.get("prompt")
    if messages or prompt is None:
        return tuple(messages)
    if not isinstance(prompt, str):
        raise TaskError(f"task row: `prompt` is a {type(prompt).__name__}: use a string, or `messages`")
    return (user_message(prompt, images),)


def _list_of(row: dict[str, Any], field: str, item: type, wanted: str) -> list[Any]:
    values = row.get(field)
    if values is None:
        return []
    if not isinstance(values, list) or not all(isinstance(v, item) for v in cast("list[object]", values)):
        raise TaskError(f"task row: `{field}` must be a list of {wanted}, got {values!r:.80}")
    return cast("list[Any]", values)


def _last_user_text(messages: tuple[Any, ...]) -> str:
    return next((message_text(m) for m in reversed(messages) if m["role"] == "user"), "")
