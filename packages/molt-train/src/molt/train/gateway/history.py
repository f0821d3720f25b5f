"""A request's messages as links that can be compared with what was recorded, whatever a client did to their bytes.

Two messages are the same when a template would show the model the same: markers such as `cache_control`, the order of
JSON keys, re-escaped arguments, the ids of calls and echoed reasoning do not count. An assistant message that names
tool calls which we issued is the turn that issued them, whatever became of its arguments.

Every distinct message is converted and digested once a session: a request whose history is long costs what is new.
What a session begins with, instructions, tools and task, others begin with too: it is read once for them all. What is
new is read in slices, between which other sessions go on. A request that is refused leaves nothing behind: its messages
are known, and what they are counted under is counted, once it is accepted.
"""

import asyncio
import hashlib
import re
from bisect import bisect_right
from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from functools import lru_cache
from operator import ne
from typing import Any, NamedTuple

import msgspec

from molt.train.gateway.call import Count, Dialect, Message, ModelCall, ToolCall
from molt.train.gateway.call_error import CallError
from molt.train.gateway.wires.body import arguments_of
from molt.train.records.turn import Wire

_encode = msgspec.json.Encoder(order="deterministic").encode

_NUM_RECENT = 8
"""Requests whose histories are kept, for later ones to begin with: sub-agents take turns."""
_NUM_TOUCHED = 4
"""Messages at the end of a history that clients may send in other bytes next time, as they move their marks."""
_SLICE_BYTES, _MESSAGE_BYTES = 2 * 1024 * 1024, 2048
"""Messages that are read at a stretch, some 20 ms: reading one costs as much as so many bytes of its text."""
_OFFLOAD_BYTES = 1024 * 1024
"""A longer message is read in a thread."""
_NUM_OPENING = 4
"""Messages with which a session may begin as others do."""
_NUM_SHARED, _SHARED_BYTES = 1024, 32 * 1024
"""Such messages, and lists of tools, that are kept; a longer one each session reads for itself."""
_SOMEWHERE = "messages[0]"
"""The path of a message that may stand in several requests: it counts in how deep the message may be nested."""
_MARKS = re.compile(r"</?think(?:ing)?>")


class Link(msgspec.Struct, frozen=True, gc=False):
    """One message: what it says, and the turn that issued it where it names one of ours."""

    role: str
    digest: bytes
    turn_id: str | None = None


class Tools(msgspec.Struct, frozen=True):
    """A request's tools, converted."""

    digest: bytes
    schemas: list[dict[str, Any]]
    raw: bytes = b"null"
    """As the client sent them."""
    notes: tuple[str, ...] = ()
    """What to count them under."""


class KnownMessage(msgspec.Struct, frozen=True, gc=False):
    """A message that was read."""

    raw: bytes
    links: tuple[Link, ...]
    notes: tuple[str, ...]
    """What to count it under."""


class IssuedReply(msgspec.Struct, frozen=True, gc=False):
    """A reply of ours that has tool calls."""

    turn_id: str
    digest: bytes
    text: str
    """What the client was shown beside the calls, stripped."""
    flattened: bytes
    """Digest of the reasoning and the text, whatever stands between them."""
    num_calls: int


class Paths:
    """Numbers for sequences of messages: equal sequences have equal numbers, the empty one 0."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[int, bytes], int] = {}

    def after(self, path: int, digest: bytes) -> int:
        """The sequence `path` with one more message."""
        return self._numbers.setdefault((path, digest), len(self._numbers) + 1)


class Chain:
    """The links of a request's messages, and what their sequence reads."""

    def __init__(self, begins_like: "Chain | None" = None, num_shared: int = 0) -> None:
        """An empty chain, or one with the first `num_shared` messages of another."""
        self.messages: list[bytes] = []
        """As the client sent them."""
        self.ends: list[int] = []
        """How many links there are after each message."""
        self.links: list[Link] = []
        self.num_system = 0
        """System messages in front."""
        self.system = 0
        """Their path."""
        self.paths = [0]
        """Path after 0, 1, ... of the links behind the leading system messages."""
        num_links = begins_like.ends[num_shared - 1] if begins_like and num_shared else 0
        if begins_like and num_links > begins_like.num_system:
            self.messages = begins_like.messages[:num_shared]
            self.ends = begins_like.ends[:num_shared]
            self.links = begins_like.links[:num_links]
            self.num_system, self.system = begins_like.num_system, begins_like.system
            self.paths = begins_like.paths[: num_links - self.num_system + 1]

    def add(self, raw: bytes, links: Sequence[Link], paths: Paths) -> None:
        """One more message, and what it says."""
        for link in links:
            if link.role == "system" and self.num_system == len(self.links):
                self.num_system += 1
                self.system = paths.after(self.system, link.digest)
            else:
                self.paths.append(paths.after(self.paths[-1], link.digest))
            self.links.append(link)
        self.messages.append(raw)
        self.ends.append(len(self.links))


class Converter:
    """Converts the messages of one request, each once."""

    def __init__(self, call: ModelCall, dialect: Dialect) -> None:
        self.wire: Wire = dialect.wire
        self._call, self._dialect = call, dialect
        self._converted: dict[int, list[Message]] = {}

    def read(self, index: int, count: Count) -> tuple[list[Message], list[str | None]]:
        """The message at an index, and the turns that its client says it is. Raises CallError."""
        messages = self._dialect.messages(self._call.messages[index], self._call.where(index), count)
        named = [message.pop("turn_id", None) for message in messages]
        self._converted[index] = messages
        return messages, named

    def read_opening(self, index: int) -> "KnownMessage | None":
        """The message at an index as it reads in any session that it begins; None where the session has a say in it."""
        raw = self._call.messages[index]
        opening = _opening(self._dialect, raw) if len(raw) <= _SHARED_BYTES else None
        if opening is None:
            return None
        self._converted[index] = opening.messages
        return opening.known

    async def messages(self, first: int) -> list[Message]:
        """All messages from an index on."""
        found: list[Message] = []
        num_bytes = 0
        for index in range(first, len(self._call.messages)):
            if index not in self._converted:
                raw, args = self._call.messages[index], (index, _nothing)  # it was counted when it was new
                await asyncio.to_thread(self.read, *args) if len(raw) > _OFFLOAD_BYTES else self.read(*args)
                num_bytes = await _slice(num_bytes, raw)
            found += self._converted[index]
        return found


class History:
    """The messages of one request."""

    def __init__(self, chain: Chain, converter: Converter | None = None) -> None:
        """Take the chain of the messages, and their converter; None: there are none."""
        self.chain, self.converter = chain, converter
        self.links, self.paths = chain.links, chain.paths
        self.num_system, self.system = chain.num_system, chain.system
        self.goes_on: Chain | None = None
        """The chain of a recent request that this one takes the place of."""
        self.new: dict[bytes, KnownMessage] = {}
        """Messages that no accepted request has had."""

    @property
    def last_turn_id(self) -> str | None:
        """The turn that the last assistant message names, where it names one of ours."""
        return next((link.turn_id for link in reversed(self.links) if link.role == "assistant"), None)

    async def messages(self, after: int = -1) -> list[Message]:
        """The converted messages behind the link at index `after`; all by default."""
        first = bisect_right(self.chain.ends, after) + 1 if after >= 0 else 0
        return await self.converter.messages(first) if self.converter else []


class MessageCache:
    """The digests of every distinct message and tool list that a session has sent."""

    def __init__(self) -> None:
        self.paths = Paths()
        self._known: defaultdict[Wire, dict[bytes, KnownMessage]] = defaultdict(dict)
        self._tools: defaultdict[Wire, dict[bytes, Tools]] = defaultdict(dict)
        self._recent: defaultdict[Wire, deque[Chain]] = defaultdict(lambda: deque(maxlen=_NUM_RECENT))
        self._issued: dict[str, IssuedReply] = {}
        self._texts: dict[str, bytes] = {}
        """Digests of our replies without calls, by turn."""
        self._digests: set[bytes] = set()
        """Of all replies of ours."""
        self._flattened: dict[bytes, bytes] = {}
        """Digests of our replies that have reasoning, by what they are when that is put in front of the text."""

    async def history(self, call: ModelCall, dialect: Dialect) -> History:
        """The history of a request. Raises CallError where one of its messages is malformed."""
        chain, goes_on = _continued(self._recent[dialect.wire], call.messages)
        converter = Converter(call, dialect)
        known, new = self._known[dialect.wire], dict[bytes, KnownMessage]()
        num_bytes = 0
        for index in range(len(chain.messages), len(call.messages)):
            raw = call.messages[index]
            message = known.get(raw) or new.get(raw)
            if message is None:
                message = converter.read_opening(index) if index < _NUM_OPENING and not known else None
                if message is None:
                    is_long = len(raw) > _OFFLOAD_BYTES
                    args = converter, index, raw
                    message = await asyncio.to_thread(self._read, *args) if is_long else self._read(*args)
                new[raw] = message
            chain.add(message.raw, message.links, self.paths)
            num_bytes = await _slice(num_bytes, raw)
        history = History(chain, converter)
        history.goes_on, history.new = goes_on, new
        return history

    def tools(self, call: ModelCall, dialect: Dialect) -> Tools:
        """The tools of a request. Raises CallError where one is malformed."""
        if call.tools == _NO_TOOLS.raw:
            return _NO_TOOLS
        known = self._tools[dialect.wire].get(call.tools)
        if known is not None:
            return known
        read = _tools if len(call.tools) <= _SHARED_BYTES else _tools.__wrapped__
        return read(dialect, call.tools)

    def keep(self, history: History, tools: Tools, count: Count) -> None:
        """Know the messages and tools of a request that is accepted again, and count what is new in them."""
        if history.converter is None:
            return
        wire = history.converter.wire
        known, recent = self._known[wire], self._recent[wire]
        notes: list[str] = []
        if tools is not _NO_TOOLS and tools.raw not in self._tools[wire]:
            notes += tools.notes
            self._tools[wire][tools.raw] = tools
        for raw, message in history.new.items():
            if raw not in known:
                known[raw] = message
                notes += message.notes
        for note in notes:
            count(note)
        if history.goes_on in recent:
            recent.remove(history.goes_on)
        recent.appendleft(history.chain)

    def issue(self, turn_id: str, text: str, reasoning: str, calls: Sequence[ToolCall]) -> bytes:
        """Know a reply of ours again. Returns its digest."""
        called = [(call.name, arguments_of(call.arguments)) for call in calls]
        digest = _assistant_digest(text, called)
        self._digests.add(digest)
        flattened = _flat_digest(reasoning + text, called) if reasoning else b""
        if reasoning:
            self._flattened[flattened] = digest
        if calls:
            reply = IssuedReply(turn_id, digest, text.strip(), flattened, len(calls))
            self._issued.update((call.call_id, reply) for call in calls)
        else:
            self._texts[turn_id] = digest
        return digest

    def _read(self, converter: Converter, index: int, raw: bytes) -> KnownMessage:
        notes: list[str] = []
        messages, named = converter.read(index, notes.append)
        links = [self._link(message, turn, notes.append) for message, turn in zip(messages, named, strict=True)]
        return KnownMessage(raw, tuple(links), tuple(notes))

    def _link(self, message: Message, named: str | None, count: Count) -> Link:
        """The link of a message; `named` is the turn that its client says it is."""
        role, said, calls = message["role"], message["content"], message.get("tool_calls", ())
        if role != "assistant":
            return _link(message)
        text = _without_reasoning(said)
        called = [(call["function"]["name"], call["function"]["arguments"]) for call in calls]
        digest = _assistant_digest(text, called)
        if digest not in self._digests and self._flattened:
            digest = self._flattened.get(_flat_digest(said, called), digest)
        if not calls:
            return Link(role, digest, named if named and self._texts.get(named) == digest else None)
        replies = {self._issued.get(call["id"]) for call in calls}
        reply = replies.pop() if len(replies) == 1 else None
        if reply is None or len(calls) != reply.num_calls:
            return Link(role, digest)
        if text.strip() not in ("", reply.text) and digest != reply.digest:
            count("reply_text_edited")
            return Link(role, digest)
        if digest != reply.digest:
            count("echo_differs")
        return Link(role, reply.digest, reply.turn_id)


def _link(message: Message) -> Link:
    """The link of a message of no assistant."""
    return Link(message["role"], digest_of([message["role"], message["content"]]))


class _Opening(NamedTuple):
    """A message that no session has a say in, for any that it begins."""

    messages: list[Message]
    """Converted; nobody changes them."""
    known: KnownMessage


@lru_cache(_NUM_SHARED)
def _opening(dialect: Dialect, raw: bytes) -> _Opening | None:
    notes: list[str] = []
    try:
        messages = dialect.messages(raw, _SOMEWHERE, notes.append)
    except CallError:  # to be refused with its own path
        return None
    if any(message["role"] == "assistant" for message in messages):  # it may be a reply of the session's
        return None
    return _Opening(messages, KnownMessage(raw, tuple(map(_link, messages)), tuple(notes)))


@lru_cache(_NUM_SHARED)
def _tools(dialect: Dialect, raw: bytes) -> Tools:
    notes: list[str] = []
    schemas = dialect.tools(raw, notes.append)
    return Tools(digest_of(schemas), schemas, raw, tuple(notes))


def _continued(recent: deque[Chain], messages: list[bytes]) -> tuple[Chain, Chain | None]:
    """A chain with as many of the messages as a recent one begins with, and that one where it is to be recent no more.

    It is not where the messages go on from it.
    """
    best, num_shared, goes_on = None, 0, None
    for chain in recent:
        shortest = min(len(chain.messages), len(messages))
        differ = map(ne, chain.messages, messages)
        num_equal = next((index for index, differs in enumerate(differ) if differs), shortest)
        if num_equal > num_shared:
            best, num_shared = chain, num_equal
        if num_shared and num_equal >= len(chain.messages) - _NUM_TOUCHED:
            goes_on = chain
            break
    return Chain(best, num_shared), goes_on


async def _slice(num_bytes: int, raw: bytes) -> int:
    """Note that a message was read; returns what was read of the slice."""
    num_bytes += len(raw) + _MESSAGE_BYTES
    if num_bytes < _SLICE_BYTES:
        return num_bytes
    await asyncio.sleep(0)
    return 0


def _nothing(_name: str) -> None:
    pass


def digest_of(value: Any) -> bytes:
    """Digest of a JSON value; the order of keys does not count."""
    return hashlib.sha256(_encode(value)).digest()


def _assistant_digest(text: str, calls: Iterable[tuple[str, Any]]) -> bytes:
    return digest_of(["assistant", text.strip(), list(calls)])


def _without_reasoning(text: str) -> str:
    """Some clients put the reasoning they were given back in front of the text."""
    return text.partition("</think>")[2] if text.lstrip().startswith("<think>") else text


def _flat_digest(text: str, calls: Iterable[tuple[str, Any]]) -> bytes:
    """Digest of a reply whose reasoning stands in front of its text, with or without marks, in whatever spacing."""
    return digest_of(["".join(_MARKS.sub("", text).split()), list(calls)])


_NO_TOOLS = Tools(digest_of([]), [])
