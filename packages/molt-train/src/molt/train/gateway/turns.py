"""The turn tree of a session: every model call, each storing only the tokens that it adds.

A turn's token row is its parent's row, its context, its sampled tokens. A request extends the longest recorded path
that its messages begin with; what it changes earlier than that opens a row of its own, with the reason recorded.
"""

import struct
from array import array
from typing import Protocol

import msgspec

from molt.train.gateway.call import Reply
from molt.train.gateway.history import History, MessageCache
from molt.train.gateway.seeds import seed_of
from molt.train.gateway.token_rows import TokenRows
from molt.train.records.turn import Turn, TurnStatus, Wire

_ID_BYTES = array("i").itemsize


class Frame(msgspec.Struct, frozen=True, gc=False):
    """What stands before the messages of a prompt."""

    system: int
    """Path of the leading system messages."""
    tools: bytes
    has_tools: bool


RAW_FRAME = Frame(system=0, tools=b"raw", has_tools=False)
"""Of prompts that are no messages."""


class TurnNode(msgspec.Struct, kw_only=True, eq=False, gc=False):
    """One model call in the tree. Packed numbers: a token costs 20 bytes, and no garbage collection visits them."""

    turn_id: str
    wire: Wire
    parent: "TurnNode | None"
    opened_by: str | None
    frame: Frame
    request: int
    """Path of the request's messages: equal, under one frame, for samples of one request."""
    response_id: str
    root_id: str
    """The turn that opened the segment: names the branch."""
    sampling: bytes
    """JSON, as `client` is: nothing for garbage collection to visit."""
    off_policy: tuple[str, ...]
    client: bytes
    prompt_length: int
    context_ids: bytes
    token_ids: bytes
    logprobs: bytes
    versions: bytes
    finish_reason: str
    status: TurnStatus = "undelivered"
    continued: bool = False
    """A later request's history contains this turn."""
    has_child: bool = False
    seed: int | None = None
    """That of its place in the tree, whether it was sampled with it or with its client's."""
    num_drawn: int = 0
    """Seeds drawn for calls that continue it."""
    twin: "TurnNode | None" = None
    """The turn recorded before this one whose path reads the same."""

    @property
    def row_length(self) -> int:
        """Tokens of its row: the prompt and the sample."""
        return self.prompt_length + len(self.token_ids) // _ID_BYTES

    @property
    def last_token(self) -> int | None:
        """The last token sampled."""
        return unpack(self.token_ids[-_ID_BYTES:])[0] if self.token_ids else None


def pack(ids: list[int]) -> bytes:
    """Token ids or versions as they are stored."""
    return struct.pack(f"{len(ids)}i", *ids)  # in half the time of an array


def unpack(packed: bytes) -> list[int]:
    """Token ids or versions again."""
    return array("i", packed).tolist()


def pack_floats(values: list[float]) -> bytes:
    """Log-probs as they are stored: not a bit is lost."""
    return struct.pack(f"{len(values)}d", *values)


def unpack_floats(packed: bytes) -> list[float]:
    """Log-probs again."""
    return array("d", packed).tolist()


class TurnSink(Protocol):
    """Where turns are kept as they are recorded."""

    def add(self, node: TurnNode) -> None:
        """Keep a turn. Raises OSError: it was not kept."""
        ...

    def mark(self, turn_id: str, *, status: TurnStatus, continued: bool) -> None:
        """Keep what became of a turn, soon."""
        ...


class Match(msgspec.Struct, frozen=True):
    """Where a request goes on."""

    parent: TurnNode | None = None
    last_link: int = -1
    """Index of the history's link that is the parent's reply."""
    opened_by: str | None = None
    """Why there is no parent."""
    diverged: str | None = None
    """Why an assistant message behind the parent's reply is none of ours; None where there is no such message."""


class TurnTree:
    """All turns of one session, in order of completion."""

    def __init__(self, sink: TurnSink | None = None) -> None:
        self.nodes: list[TurnNode] = []
        self._sink = sink
        self.seed: int | None = None
        """What its calls' sampling seeds are made of; None: they have none."""
        self.num_drawn = 0
        """Seeds drawn for calls that begin a branch."""
        self.messages = MessageCache()
        self._by_path: dict[int, TurnNode] = {}
        self._requests: dict[tuple[int, Frame], TurnNode] = {}
        """The last turn recorded of each request."""
        self._has_root = False
        self._token_rows: TokenRows[TurnNode] | None = None

    def match(self, history: History, frame: Frame) -> Match:
        """The longest recorded path that the request extends, or why it extends none."""
        links, first = history.links, history.num_system
        reasons: list[str] = []
        for index in range(len(links) - 1, first - 1, -1):
            if links[index].role != "assistant":
                continue
            twins = self._twins(history.paths[index - first + 1])
            if candidates := [node for node in twins if node.frame == frame]:
                diverged = reasons[-1] if reasons else None
                return Match(parent=_likeliest(candidates, history), last_link=index, diverged=diverged)
            reasons.append(self._unknown(history.paths[index - first], frame, twins))
        changes = [reason for reason in reasons if reason in ("system_changed", "tools_changed")]
        if reasons:
            return Match(opened_by=changes[0] if changes else reasons[-1])
        is_known = (history.paths[-1], frame) in self._requests
        return Match(opened_by="resampled" if is_known else "new_conversation")

    def match_tokens(self, token_ids: list[int], request: int) -> Match:
        """The longest recorded row that a raw prompt begins with, or why it begins with none."""
        self._token_rows = self._token_rows or TokenRows[TurnNode]()
        self._token_rows.learn(self.nodes)
        if parent := self._token_rows.find(pack(token_ids)):
            return Match(parent=parent)
        return Match(opened_by="resampled" if (request, RAW_FRAME) in self._requests else "new_conversation")

    def prompt(self, parent: TurnNode | None, context_ids: list[int]) -> list[int]:
        """The token ids that the engine is given: the parent's row, then the context."""
        if parent is None:
            return list(context_ids)
        row = b"".join([packed for turn in _path(parent) for packed in (turn.context_ids, turn.token_ids)])
        return unpack(row) + context_ids

    def draw_seed(self, parent: TurnNode | None) -> int | None:
        """The sampling seed of the next call that continues `parent`: of its branch, its depth, and its number there.

        So an agent that does the same draws the same, whatever other sessions do meanwhile. Calls that it makes at once
        are numbered as they come.
        """
        before = self.seed if parent is None else parent.seed
        if before is None:
            return None
        place = parent or self
        place.num_drawn += 1
        return seed_of(before, place.num_drawn)

    def add(self, node: TurnNode) -> None:
        """Record a turn that no request can continue, since its client was never given the whole of it.

        Raises:
            OSError: The turn is recorded, but could not be kept.
        """
        if node.parent is None:
            node.opened_by = self._opened_by(node)
        self.nodes.append(node)
        self._requests[node.request, node.frame] = node
        if self._sink:
            self._sink.add(node)

    def publish(self, node: TurnNode, match: Match, path: int, reply: Reply, prefill: str = "") -> str | None:
        """Record a turn that requests can continue. `path` is that of the messages it answers.

        Returns:
            What to count it under where it is not the first to continue its parent, or not from where the parent ends.

        Raises:
            OSError: The turn could not be kept, so it is recorded as one that failed: its client must not get it.
        """
        fork = self._fork(node, match)
        try:
            if self._sink:
                self._sink.add(node)
        except OSError:
            node.status, node.finish_reason = "failed", "error"
            raise
        finally:
            self.nodes.append(node)
        digest = self.messages.issue(node.turn_id, prefill + reply.content, reply.reasoning, reply.calls)
        path = self.messages.paths.after(path, digest)
        node.twin = self._by_path.get(path)
        self._by_path[path] = node
        self._requests[node.request, node.frame] = node
        return fork

    def mark(self, node: TurnNode, status: TurnStatus) -> None:
        """Note that a reply was handed over, or was not after all."""
        node.status = status
        self._keep_mark(node)

    def adopt(self, node: TurnNode) -> bool:
        """Note that a request continues a turn, which proves that its client has it.

        Returns:
            Whether nothing else had said so.
        """
        is_news = node.status == "undelivered"
        if is_news or not node.continued:
            node.continued = True
            self.mark(node, "delivered" if is_news else node.status)
        return is_news

    def seal(self) -> None:
        """Keep the turns only: no request is to be matched any more."""
        self.messages = MessageCache()
        self._by_path.clear()
        self._requests.clear()
        self._token_rows = None

    def turns(self, session_id: str) -> list[Turn]:
        """The turns as records."""
        adopted, auxiliary = self._adopted(), self._auxiliary()
        return [
            Turn(
                turn_id=node.turn_id,
                session_id=session_id,
                wire=node.wire,
                parent_turn_id=node.parent.turn_id if node.parent else None,
                opened_by=node.opened_by,
                response_id=node.response_id,
                status=node.status,
                adopted=node.turn_id in adopted,
                auxiliary=node.turn_id in auxiliary,
                finish_reason=node.finish_reason,
                prompt_length=node.prompt_length,
                context_ids=unpack(node.context_ids),
                token_ids=unpack(node.token_ids),
                logprobs=unpack_floats(node.logprobs),
                versions=unpack(node.versions),
                sampling=msgspec.json.decode(node.sampling),
                off_policy=list(node.off_policy),
                client=msgspec.json.decode(node.client),
            )
            for node in self.nodes
        ]

    def _keep_mark(self, node: TurnNode) -> None:
        if self._sink:
            self._sink.mark(node.turn_id, status=node.status, continued=node.continued)

    def _fork(self, node: TurnNode, match: Match) -> str | None:
        if node.parent is None:
            node.opened_by = self._opened_by(node)
            self._has_root = True
            return None
        first, node.parent.has_child = not node.parent.has_child, True
        if match.diverged is not None:
            return f"forks.{match.diverged}"
        if first:
            return None
        return "forks.resampled" if (node.request, node.frame) in self._requests else "forks.branched"

    def _opened_by(self, node: TurnNode) -> str | None:
        """Why a turn has no parent, now that it is recorded: a sibling of its request may have been so before it."""
        if not self._has_root and node.opened_by != "cut_turn_echoed":
            return "start"
        is_sibling = node.opened_by == "new_conversation" and (node.request, node.frame) in self._requests
        return "resampled" if is_sibling else node.opened_by

    def _unknown(self, before: int, frame: Frame, twins: list[TurnNode]) -> str:
        """Why an assistant message behind the path `before` is no turn under `frame`; `twins` are, under others."""
        if twins:
            return "system_changed" if twins[0].frame.system != frame.system else "tools_changed"
        asked = self._requests.get((before, frame))
        return "cut_turn_echoed" if asked is not None and asked.status != "delivered" else "history_rewritten"

    def _twins(self, path: int) -> list[TurnNode]:
        """Turns whose path reads the same, the latest first."""
        twins, node = [], self._by_path.get(path)
        while node:
            twins.append(node)
            node = node.twin
        return twins

    def _adopted(self) -> set[str]:
        """Turns that a later request continued, and of the requests with none such the last delivered sample."""
        continued = {node.turn_id for node in self.nodes if node.continued}
        settled = {(node.request, node.frame) for node in self.nodes if node.continued}
        last = {
            (node.request, node.frame): node.turn_id
            for node in self.nodes
            if node.status == "delivered" and (node.request, node.frame) not in settled
        }
        return continued | set(last.values())

    def _auxiliary(self) -> set[str]:
        """Calls beside the conversation, such as title generators: no tools, another system text, never continued.

        Beside a conversation that has no tools itself nothing tells them from an agent's helpers that answer once, such
        as a critic, which are to be trained: none is marked. Nor are raw prompts, which have no system text to compare.
        """
        roots = [node for node in self.nodes if node.parent is None and node.frame != RAW_FRAME]
        main = {node.frame.system for node in roots if node.frame.has_tools}
        return {
            node.turn_id
            for node in roots
            if main and not node.frame.has_tools and not node.continued and node.frame.system not in main
        }


def _path(node: TurnNode) -> list[TurnNode]:
    path: list[TurnNode] = [node]
    while path[-1].parent:
        path.append(path[-1].parent)
    return path[::-1]


def _likeliest(candidates: list[TurnNode], history: History) -> TurnNode:
    """Of turns that read the same, the latest first: the one whose path has most of the turns that a request names."""
    if len(candidates) == 1:
        return candidates[0]
    named = {link.turn_id for link in history.links}
    return max(
        candidates, key=lambda node: (len(named & {turn.turn_id for turn in _path(node)}), node.status == "delivered")
    )
