"""The turn tree of a session: every model call, each storing only the tokens that it adds.

A turn's token row is its parent's row, its context, its sampled tokens. A request extends the longest recorded path
that its messages begin with; what it changes earlier than that opens a row of its own, with the reason recorded.
"""

from array import array
from collections import OrderedDict
from typing import Any

import msgspec

from molt.train.gateway.call import Reply
from molt.train.gateway.history import History, MessageCache
from molt.train.records.turn import Turn, TurnStatus, Wire

_MAX_CACHED_ROWS = 4
_ID_BYTES = array("i").itemsize


class Frame(msgspec.Struct, frozen=True, gc=False):
    """What stands before the messages of a prompt."""

    system: int
    """Path of the leading system messages."""
    tools: bytes
    has_tools: bool


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
    sampling: dict[str, Any]
    off_policy: tuple[str, ...]
    client: dict[str, str]
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
    twin: "TurnNode | None" = None
    """The turn recorded before this one whose path reads the same."""

    @property
    def last_token(self) -> int | None:
        """The last token sampled."""
        return unpack(self.token_ids[-_ID_BYTES:])[0] if self.token_ids else None


def pack(ids: list[int]) -> bytes:
    """Token ids or versions as they are stored."""
    return array("i", ids).tobytes()


def unpack(packed: bytes) -> list[int]:
    """Token ids or versions again."""
    return array("i", packed).tolist()


def pack_floats(values: list[float]) -> bytes:
    """Log-probs as they are stored: not a bit is lost."""
    return array("d", values).tobytes()


class Match(msgspec.Struct, frozen=True):
    """Where a request goes on."""

    parent: TurnNode | None = None
    last_link: int = -1
    """Index of the history's link that is the parent's reply."""
    opened_by: str | None = None
    """Why there is no parent."""


class TurnTree:
    """All turns of one session, in order of completion."""

    def __init__(self) -> None:
        self.nodes: list[TurnNode] = []
        self.messages = MessageCache()
        self._by_path: dict[int, TurnNode] = {}
        self._requests: set[tuple[int, Frame]] = set()
        self._rows: OrderedDict[str, list[int]] = OrderedDict()
        self._has_root = False

    def match(self, history: History, frame: Frame) -> Match:
        """The longest recorded path that the request extends, or why it extends none."""
        named = {link.turn_id for link in history.links if link.turn_id is not None}
        changed = None
        for index in range(len(history.links) - 1, history.num_system - 1, -1):
            link = history.links[index]
            twins = self._twins(history.paths[index - history.num_system + 1]) if link.role == "assistant" else []
            if candidates := [node for node in twins if node.frame == frame]:
                return Match(parent=_likeliest(candidates, named), last_link=index)
            if twins and changed is None:
                changed = "system_changed" if twins[0].frame.system != frame.system else "tools_changed"
        return Match(opened_by=changed or self._reason(history, frame))

    def prompt(self, parent: TurnNode | None, context_ids: list[int]) -> list[int]:
        """The token ids that the engine is given: the parent's row, then the context."""
        return [*self._row(parent), *context_ids] if parent else list(context_ids)

    def add(self, node: TurnNode) -> None:
        """Record a turn that no request can continue, since its client was never given the whole of it."""
        if node.parent is None and not self._has_root:
            node.opened_by = "start"
        self.nodes.append(node)

    def publish(self, node: TurnNode, prompt: list[int], path: int, reply: Reply, prefill: str = "") -> str | None:
        """Record a turn that requests can continue. `path` is that of the messages it answers.

        Returns:
            What to count it under where it is not the first to continue its parent.
        """
        self.nodes.append(node)
        fork = self._fork(node)
        digest = self.messages.issue(node.turn_id, prefill + reply.content, reply.calls)
        path = self.messages.paths.after(path, digest)
        node.twin = self._by_path.get(path)
        self._by_path[path] = node
        self._requests.add((node.request, node.frame))
        if node.parent:
            self._rows.pop(node.parent.turn_id, None)
        self._keep_row(node, prompt + unpack(node.token_ids))
        return fork

    def seal(self) -> None:
        """Keep the turns only: no request is to be matched any more."""
        self.messages = MessageCache()
        self._by_path.clear()
        self._requests.clear()
        self._rows.clear()

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
                logprobs=array("d", node.logprobs).tolist(),
                versions=unpack(node.versions),
                sampling=node.sampling,
                off_policy=list(node.off_policy),
                client=node.client,
            )
            for node in self.nodes
        ]

    def _fork(self, node: TurnNode) -> str | None:
        if node.parent is None:
            if not self._has_root:
                self._has_root, node.opened_by = True, "start"
            return None
        first, node.parent.has_child = not node.parent.has_child, True
        if first:
            return None
        return "forks.resampled" if (node.request, node.frame) in self._requests else "forks.branched"

    def _reason(self, history: History, frame: Frame) -> str:
        if history.has_reply:
            return "history_rewritten"
        return "resampled" if (history.paths[-1], frame) in self._requests else "new_conversation"

    def _twins(self, path: int) -> list[TurnNode]:
        """Turns whose path reads the same, the latest first."""
        twins, node = [], self._by_path.get(path)
        while node:
            twins.append(node)
            node = node.twin
        return twins

    def _row(self, node: TurnNode) -> list[int]:
        row = self._rows.get(node.turn_id)
        if row is None:
            row = unpack(b"".join([packed for turn in _path(node) for packed in (turn.context_ids, turn.token_ids)]))
            self._keep_row(node, row)
        return row

    def _keep_row(self, node: TurnNode, row: list[int]) -> None:
        self._rows[node.turn_id] = row
        if len(self._rows) > _MAX_CACHED_ROWS:
            self._rows.popitem(last=False)

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
        """Calls beside the conversation, such as title generators: no tools, another system text, never continued."""
        roots = [node for node in self.nodes if node.parent is None]
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


def _likeliest(candidates: list[TurnNode], named: set[str]) -> TurnNode:
    """Of turns that read the same, the latest first: the one whose path has most of the turns that a request names."""
    if len(candidates) == 1:
        return candidates[0]
    return max(
        candidates, key=lambda node: (len(named & {turn.turn_id for turn in _path(node)}), node.status == "delivered")
    )
