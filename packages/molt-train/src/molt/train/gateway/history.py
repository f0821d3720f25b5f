"""A request's messages as links that can be compared with what was recorded, whatever a client did to their bytes.

Two messages are the same when a template would show the model the same: markers such as `cache_control`, the order of
JSON keys, re-escaped arguments, the ids of calls and echoed reasoning do not count. An assistant message that names
tool calls which we issued is the turn that issued them, whatever became of its arguments.

Every distinct message is converted and digested once a session: a request whose history is long costs what is new.
"""

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from molt.train.gateway.call import Count, Dialect, Message, ModelCall, ToolCall
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


class IssuedCall(msgspec.Struct, frozen=True, gc=False):
    """Which turn issued a tool call, and the digest of that turn's reply."""

    turn_id: str
    digest: bytes
    text: str
    """The text that the client was shown beside the calls, stripped."""
    num_calls: int


class History:
    """The messages of one request."""

    def __init__(self, links: Sequence[Sequence[Link]], convert: Callable[[int], list[Message]]) -> None:
        """Take the links of each message as the client sent it, and how to convert the message at an index."""
        self.links = [link for group in links for link in group]
        self._origin = [index for index, group in enumerate(links) for _ in group]
        self._num_sent = len(links)
        self._convert = convert
        self.num_system = next((i for i, link in enumerate(self.links) if link.role != "system"), len(self.links))
        self.system = chain(b"", self.links[: self.num_system])[-1]
        self.states = chain(b"", self.links[self.num_system :])[1:]
        """Chained digest after each link behind the leading system messages."""

    @property
    def state(self) -> bytes:
        """Chained digest of the whole request, leading system messages left out."""
        return self.states[-1] if self.states else b""

    def messages(self, after: int = -1) -> list[Message]:
        """The converted messages behind the link at index `after`; all by default."""
        start = 0 if after < 0 else self._origin[after] + 1
        return [message for index in range(start, self._num_sent) for message in self._convert(index)]


class MessageCache:
    """The digests of every distinct message and tool list that a session has sent."""

    def __init__(self) -> None:
        self._links: dict[tuple[Wire, bytes], tuple[Link, ...]] = {}
        self._tools: dict[tuple[Wire, bytes], Tools] = {}
        self.issued: dict[str, IssuedCall] = {}
        """Tool-call id to the turn that issued it."""

    def history(self, call: ModelCall, dialect: Dialect, count: Count) -> History:
        """The history of a request. Raises Fault where one of its messages is malformed."""
        converted: dict[int, list[Message]] = {}

        def convert(index: int) -> list[Message]:
            if index not in converted:
                where = f"messages[{index - call.num_leading}]" if index >= call.num_leading else "system"
                converted[index] = dialect.messages(call.messages[index], where, count)
            return converted[index]

        links = []
        for index, raw in enumerate(call.messages):
            known = self._links.get((dialect.wire, raw))
            if known is None:
                known = tuple(self._link(message, count) for message in convert(index))
                self._links[dialect.wire, raw] = known
            links.append(known)
        return History(links, convert)

    def tools(self, call: ModelCall, dialect: Dialect, count: Count) -> Tools:
        """The tools of a request. Raises Fault where one is malformed."""
        known = self._tools.get((dialect.wire, call.tools))
        if known is None:
            schemas = dialect.tools(call.tools, count)
            known = self._tools[dialect.wire, call.tools] = Tools(digest_of(schemas), schemas)
        return known

    def _link(self, message: Message, count: Count) -> Link:
        role, text, calls = message["role"], message["content"], message.get("tool_calls", ())
        if role != "assistant":
            return Link(role, digest_of([role, text]))
        text = _without_reasoning(text)
        digest = assistant_digest(text, [(call["function"]["name"], call["function"]["arguments"]) for call in calls])
        turns = {self.issued.get(call["id"]) for call in calls}
        turn = turns.pop() if len(turns) == 1 else None
        if turn is None or len(calls) != turn.num_calls:
            return Link(role, digest)
        if text.strip() not in ("", turn.text):
            count("assistant_text_edited")
            return Link(role, digest)
        if digest != turn.digest:
            count("echoed_call_differs")
        return Link(role, turn.digest, turn.turn_id)


def chain(state: bytes, links: Sequence[Link]) -> list[bytes]:
    """The running digest: `state`, then after each link."""
    states = [state]
    for link in links:
        state = extend(state, link.digest)
        states.append(state)
    return states


def extend(state: bytes, digest: bytes) -> bytes:
    """The running digest after one more message."""
    return hashlib.sha256(state + digest).digest()


def digest_of(value: Any) -> bytes:
    """Digest of a JSON value; the order of keys does not count."""
    return hashlib.sha256(_encode(value)).digest()


def assistant_digest(text: str, calls: Sequence[tuple[str, Any]]) -> bytes:
    """Digest of an assistant message from its text and the name and arguments of its calls."""
    return digest_of(["assistant", text.strip(), calls])


def reply_calls(calls: Sequence[ToolCall]) -> list[tuple[str, Any]]:
    """Name and parsed arguments of the calls of a reply."""
    return [(call.name, msgspec.json.decode(call.arguments)) for call in calls]



def _without_reasoning(text: str) -> str:
    """Some clients put the reasoning they were given back in front of the text."""
    return text.partition("</think>")[2] if text.lstrip().startswith("<think>") else text
