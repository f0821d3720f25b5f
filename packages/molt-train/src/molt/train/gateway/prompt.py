"""From a parsed call to the prompt that the engine is given: what it continues, and the tokens that are new."""

import asyncio
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import msgspec

from molt.train.engine.protocol import Engine, Grammar
from molt.train.gateway.call import Dialect, Message, ModelCall
from molt.train.gateway.call_error import CallError
from molt.train.gateway.grammar import Reasoning, reply_grammar
from molt.train.gateway.history import Chain, History, Paths, Tools, digest_of
from molt.train.gateway.join import join_turns
from molt.train.gateway.parse import Parser
from molt.train.gateway.render import Renderer, RenderError
from molt.train.gateway.sessions import Session
from molt.train.gateway.turns import RAW_FRAME, Frame, Match

_OFFLOAD_CHARS = 32 * 1024
"""More new text than this is rendered and encoded in a thread, so that other requests go on."""
_OPENING_TOKENS = 8
"""Tokens at a prompt's end among which the template may open the reasoning."""
_NO_TOOLS = Tools(b"", [])


class Model(msgspec.Struct, frozen=True, kw_only=True):
    """The served policy: where tokens come from, and how they are written and read."""

    name: str
    """For clients that name none."""
    engine: Engine
    renderer: Renderer
    parser: Parser
    max_model_len: int
    """Context window in tokens."""
    hidden_token_ids: frozenset[int]
    """Control tokens that no client sees."""


class Conversation(msgspec.Struct, frozen=True, kw_only=True):
    """What a call says, in the terms of its session: enough to know it again, nothing rendered yet."""

    history: History
    tools: Tools
    frame: Frame
    request: int
    """Path of the messages, and of the beginning of the reply where the client gave one."""
    raw_requests: tuple[int, ...] = ()
    """Paths of the raw prompts, each alone."""


class Prompt(msgspec.Struct, frozen=True, kw_only=True):
    """A call, ready to be sampled."""

    match: Match
    frame: Frame
    path: int
    """Of the request's messages."""
    request: int
    """The same, with the beginning of the reply where the client gave one."""
    context_ids: list[int]
    token_ids: list[int]
    """The whole prompt: the parent's row, then `context_ids`."""
    opens_reasoning: bool
    grammar: Grammar | None
    """What bounds the reply; None: it is free."""
    tools: list[dict[str, Any]] = []
    """Function schemas that the reply may call."""
    notes: tuple[str, ...] = ()
    """Names under which to count what the request asks for in vain."""
    is_raw: bool = False
    """Given as text or token ids: the reply is text, whatever it spells."""


async def read_conversation(session: Session, call: ModelCall, dialect: Dialect) -> Conversation:
    """Read the call's messages and tools. Records nothing, and counts nothing before `accept`.

    Raises:
        CallError: A message or a tool is malformed.
    """
    cache = session.tree.messages
    if call.raw_prompts:
        return await _read_raw(cache.paths, call.raw_prompts)
    tools = cache.tools(call, dialect)
    history = await cache.history(call, dialect)
    request = history.paths[-1]
    return Conversation(
        history=history,
        tools=tools,
        frame=Frame(history.system, tools.digest, bool(tools.schemas)),
        request=cache.paths.after(request, digest_of(call.prefill)) if call.prefill else request,
    )


def accept(session: Session, call: ModelCall, conversation: Conversation, prompts: Sequence[Prompt]) -> None:
    """Know again what an accepted call says, and count what of it has no effect: once, however often it is sent."""
    for note in (*call.notes, *(note for prompt in prompts for note in prompt.notes)):
        session.count(note)
    session.tree.messages.keep(conversation.history, conversation.tools, session.count)


def room_for(model: Model, token_ids: Sequence[int]) -> int:
    """Tokens of the context window that a prompt leaves for its reply; one at least.

    Raises:
        CallError: It leaves none.
    """
    room = model.max_model_len - len(token_ids)
    if room < 1:
        message = f"prompt is too long: {len(token_ids)} tokens > {model.max_model_len} maximum"
        raise CallError("prompt_too_long", message)
    return room


async def prepare_each(model: Model, session: Session, call: ModelCall, conversation: Conversation) -> list[Prompt]:
    """The call's prompt, or each of its raw prompts. Records nothing.

    Raises:
        CallError: A prompt cannot be made.
    """
    if not call.raw_prompts:
        return [await prepare(model, session, call, conversation)]
    return [
        await _prepare_raw(model, session, call, request, index=index)
        for index, request in enumerate(conversation.raw_requests)
    ]


async def prepare(model: Model, session: Session, call: ModelCall, conversation: Conversation) -> Prompt:
    """Find what the call continues, and make its prompt. Records nothing.

    Raises:
        CallError: The template cannot render its messages, or the request demands a reply that cannot be.
    """
    history, tools, frame, renderer = conversation.history, conversation.tools, conversation.frame, model.renderer
    match = session.tree.match(history, frame)
    context_ids = None
    if match.parent:
        try:
            messages = await _turns(call, history, after=match.last_link)
            context_ids = await _render(renderer.delta, messages, tools.schemas, call.template_kwargs)
        except RenderError:
            match = Match(opened_by="delta_unrenderable")
        else:
            ends = renderer.end_token_ids
            if context_ids and context_ids[0] in ends and match.parent.last_token in ends:
                del context_ids[0]  # the turn was ended when it was sampled, by this token or another that ends turns
    if context_ids is None:
        try:
            messages = await _turns(call, history)
            context_ids = await _render(renderer.first_prompt, messages, tools.schemas, call.template_kwargs)
        except RenderError as error:
            raise CallError("invalid_request", str(error), param=error.param) from error
    reasoning = _reasoning(model, context_ids) if not call.prefill else "none"
    if call.prefill:
        context_ids += renderer.encode(call.prefill)
    notes: list[str] = []
    grammar = reply_grammar(
        call, tools.schemas, parser=model.parser, reasoning=reasoning, policy=session.policy, count=notes.append
    )
    return Prompt(
        match=match,
        frame=frame,
        path=history.paths[-1],
        request=conversation.request,
        context_ids=context_ids,
        token_ids=session.tree.prompt(match.parent, context_ids),
        opens_reasoning=reasoning == "open",
        tools=tools.schemas,
        grammar=grammar,
        notes=tuple(notes),
    )


async def _read_raw(paths: Paths, prompts: Sequence[str | list[int]]) -> Conversation:
    request, alone = 0, list[int]()
    for prompt in prompts:
        is_long = len(prompt) > _OFFLOAD_CHARS
        digest = await asyncio.to_thread(digest_of, prompt) if is_long else digest_of(prompt)
        request = paths.after(request, digest)
        alone.append(paths.after(0, digest))
    history = History(Chain())
    return Conversation(history=history, tools=_NO_TOOLS, frame=RAW_FRAME, request=request, raw_requests=tuple(alone))


async def _prepare_raw(model: Model, session: Session, call: ModelCall, request: int, *, index: int) -> Prompt:
    """The prompt that a text or a list of token ids is. It continues the row that its ids begin with."""
    renderer, tree, raw = model.renderer, session.tree, call.raw_prompts[index]
    where = "prompt" if len(call.raw_prompts) == 1 else f"prompt[{index}]"
    if isinstance(raw, list):
        token_ids = raw
    elif len(raw) > _OFFLOAD_CHARS:
        token_ids = await asyncio.to_thread(renderer.encode_raw, raw)
    else:
        token_ids = renderer.encode_raw(raw)
    if not token_ids:
        raise CallError("invalid_request", "the prompt is empty: send at least one token", param=where)
    room_for(model, token_ids)  # nothing is looked up of what cannot be sampled
    if max(token_ids) >= renderer.vocab_size:
        message = f"the prompt has token id {max(token_ids)}: the model's ids are below {renderer.vocab_size}"
        raise CallError("invalid_request", message, param=where)
    match = tree.match_tokens(token_ids, request)
    parent_length = match.parent.row_length if match.parent else 0
    notes: list[str] = []
    grammar = reply_grammar(call, (), parser=model.parser, reasoning="none", policy=session.policy, count=notes.append)
    return Prompt(
        match=match,
        frame=RAW_FRAME,
        path=request,
        request=request,
        context_ids=token_ids[parent_length:],
        token_ids=token_ids,
        opens_reasoning=False,
        grammar=grammar,
        notes=tuple(notes),
        is_raw=True,
    )


async def _turns(call: ModelCall, history: History, *, after: int = -1) -> list[Message]:
    messages = await history.messages(after)
    return join_turns(messages) if call.joins_turns else messages


def _reasoning(model: Model, context_ids: list[int]) -> Reasoning:
    """Whether the reply to a prompt that ends like this may begin with reasoning."""
    return _reasoning_behind(model.renderer, model.parser, tuple(context_ids[-_OPENING_TOKENS:]))


@lru_cache(maxsize=1024)
def _reasoning_behind(renderer: Renderer, parser: Parser, token_ids: tuple[int, ...]) -> Reasoning:
    end = renderer.decode(list(token_ids)).rstrip()
    if parser.opens_reasoning and end.endswith(parser.opens_reasoning):
        return "open"
    knows_none = parser.opens_reasoning not in renderer.control_tokens
    return "none" if knows_none or end.endswith(parser.closes_reasoning) else "optional"


async def _render(
    render: Callable[[Sequence[Message], list[dict[str, Any]], dict[str, Any]], list[int]],
    messages: list[Message],
    tools: list[dict[str, Any]],
    template_kwargs: dict[str, Any],
) -> list[int]:
    if sum(len(message["content"]) for message in messages) > _OFFLOAD_CHARS:
        return await asyncio.to_thread(render, messages, tools, template_kwargs)
    return render(messages, tools, template_kwargs)
