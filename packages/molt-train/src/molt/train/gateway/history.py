"""A request's messages as links that can be compared with what was recorded, whatever a client did to their bytes.

Two messages are the same when a template would show the model the same: markers such as `cache_control`, the order of
JSON keys, re-escaped arguments, the ids of calls and echoed reasoning do not count. An assistant message that names
tool calls which we issued is the turn that issued them, whatever became of its arguments.

Every distinct message is converted and digested once a session: a request whose history is long costs what is new.
"""

import hashlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgspec

from molt.train.gateway.call import Count, Dialect, Message, ModelCall, ToolCall
from molt.train.gateway.wires.body import arguments_of
from molt.train.records.turn import Wire

_encode = msgspec.json.Encoder(order="deterministic").encode


class Link(msgspec.Struct, frozen=True, gc=False):
    """One message: what it says, and the turn that issued it where it names one of ours."""

    role: str
    digest: bytes
    turn_id: str | None = None


class Tools(msgspec.Struct, frozen=True):
    """A request's tools, converted."""

    digest: bytes
    schemas: list[dict[str, Any]]


class IssuedReply(msgspec.Struct, frozen=True, gc=False):
    """A reply of ours that has tool calls."""

    turn_id: str
    digest: bytes
    text: str
    """What the client was shown beside the calls, stripped."""
    num_calls: int


class Paths:
    """Numbers for sequences of messages: equal sequences have equal numbers, the empty one 0."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[int, bytes], int] = {}

    def after(self, path: int, digest: bytes) -> int:
        """The sequence `path` with one more message."""
        return self._numbers.setdefault((path, digest), len(self._numbers) + 1)


class History:
    """The messages of one request."""

    def __init__(self, groups: Sequence[Sequence[Link]], paths: Paths, convert: Callable[[int], list[Message]]) -> None:
        """Take the links of each message as the client sent it, and how to convert the message at an index."""
        self._groups = groups
        self._convert = convert
        self.links = [link for group in groups for link in group]
        self.num_system = next((i for i, link in enumerate(self.links) if link.role != "system"), len(self.links))
        self.system = 0
        """Path of the leading system messages."""
        for link in self.links[: self.num_system]:
            self.system = paths.after(self.system, link.digest)
        self.paths = [0]
        """Path after 0, 1, ... of the links behind the leading system messages."""
        for link in self.links[self.num_system :]:
            self.paths.append(paths.after(self.paths[-1], link.digest))

    @property
    def has_reply(self) -> bool:
        """Whether an assistant has spoken."""
        return any(link.role == "assistant" for link in self.links)

    def messages(self, after: int = -1) -> list[Message]:
        """The converted messages behind the link at index `after`; all by default."""
        sent = 0
        while after >= 0:
            after -= len(self._groups[sent])
            sent += 1
        return [message for index in range(sent, len(self._groups)) for message in self._convert(index)]


class MessageCache:
    """The digests of every distinct message and tool list that a session has sent."""

    def __init__(self) -> None:
        self.paths = Paths()
        self._links: defaultdict[Wire, dict[bytes, tuple[Link, ...]]] = defaultdict(dict)
        self._tools: defaultdict[Wire, dict[bytes, Tools]] = defaultdict(dict)
        self._issued: dict[str, IssuedReply] = {}

    def history(self, call: ModelCall, dialect: Dialect, count: Count) -> History:
        """The history of a request. Raises CallError where one of its messages is malformed."""
        converted: dict[int, list[Message]] = {}

        def convert(index: int) -> list[Message]:
            if index not in converted:
                where = f"messages[{index - call.num_leading}]" if index >= call.num_leading else "system"
                converted[index] = dialect.messages(call.messages[index], where, count)
            return converted[index]

        known = self._links[dialect.wire]
        for index, raw in enumerate(call.messages):
            if raw not in known:
                known[raw] = tuple(self._link(message, count) for message in convert(index))
        return History([known[raw] for raw in call.messages], self.paths, convert)

    def tools(self, call: ModelCall, dialect: Dialect, count: Count) -> Tools:
        """The tools of a request. Raises CallError where one is malformed."""
        known = self._tools[dialect.wire]
        if call.tools not in known:
            schemas = dialect.tools(call.tools, count)
            known[call.tools] = Tools(digest_of(schemas), schemas)
        return known[call.tools]

    def issue(self, turn_id: str, text: str, calls: Sequence[ToolCall]) -> bytes:
        """Know a reply of ours again by the ids of its calls. Returns its digest."""
        digest = _assistant_digest(text, [(call.name, arguments_of(call.arguments)) for call in calls])
        reply = IssuedReply(turn_id, digest, text.strip(), len(calls))
        self._issued.update((call.call_id, reply) for call in calls)
        return digest

    def _link(self, message: Message, count: Count) -> Link:
        role, text, calls = message["role"], message["content"], message.get("tool_calls", ())
        if role != "assistant":
            return Link(role, digest_of([role, text]))
        text = _without_reasoning(text)
        digest = _assistant_digest(text, [(call["function"]["name"], call["function"]["arguments"]) for call in calls])
        replies = {self._issued.get(call["id"]) for call in calls}
        reply = replies.pop() if len(replies) == 1 else None
        if reply is None or len(calls) != reply.num_calls:
            return Link(role, digest)
        if text.strip() not in ("", reply.text):
            count("reply_text_edited")
            return Link(role, digest)
        if digest != reply.digest:
            count("echo_differs")
        return Link(role, reply.digest, reply.turn_id)


def digest_of(value: Any) -> bytes:
    """Digest of a JSON value; the order of keys does not count."""
    return hashlib.sha256(_encode(value)).digest()


def _assistant_digest(text: str, calls: Iterable[tuple[str, Any]]) -> bytes:
    return digest_of(["assistant", text.strip(), list(calls)])


def _without_reasoning(text: str) -> str:
    """Some clients put the reasoning they were given back in front of the text."""
    return text.partition("</think>")[2] if text.lstrip().startswith("<think>") else text
