"""From a parsed call to the prompt that the engine is given: what it continues, and the tokens that are new."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from molt.train.engine.protocol import Engine
from molt.train.gateway.call import Dialect, Message, ModelCall
from molt.train.gateway.call_error import CallError
from molt.train.gateway.history import digest_of
from molt.train.gateway.parse import Parser
from molt.train.gateway.render import Renderer, RenderError
from molt.train.gateway.sessions import Session
from molt.train.gateway.turns import Frame, Match

_OFFLOAD_CHARS = 32 * 1024
"""More new text than this is rendered and encoded in a thread, so that other requests go on."""
_OPENING_TOKENS = 8
"""Tokens at a prompt's end among which the template may open the reasoning."""


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


async def prepare(model: Model, session: Session, call: ModelCall, dialect: Dialect) -> Prompt:
    """Find what the call continues, and make its prompt. Records nothing.

    Raises:
        CallError: A message or a tool is malformed, or the template cannot render them.
    """
    cache, renderer = session.tree.messages, model.renderer
    tools = cache.tools(call, dialect, session.count)
    history = cache.history(call, dialect, session.count)
    frame = Frame(history.system, tools.digest, bool(tools.schemas))
    match = session.tree.match(history, frame)
    context_ids = None
    if match.parent:
        try:
            messages = history.messages(match.last_link)
            context_ids = await _render(renderer.delta, messages, tools.schemas, call.template_kwargs)
        except RenderError:
            match = Match(opened_by="delta_unrenderable")
        else:
            if context_ids and context_ids[0] == match.parent.last_token and context_ids[0] in renderer.end_token_ids:
                del context_ids[0]
    if context_ids is None:
        try:
            messages = history.messages()
            context_ids = await _render(renderer.first_prompt, messages, tools.schemas, call.template_kwargs)
        except RenderError as error:
            raise CallError("invalid_request", str(error), param="messages") from error
    opens_reasoning = renderer.decode(context_ids[-_OPENING_TOKENS:]).rstrip().endswith(model.parser.opens_reasoning)
    if call.prefill:
        context_ids += renderer.encode(call.prefill)
    return Prompt(
        match=match,
        frame=frame,
        path=history.paths[-1],
        request=cache.paths.after(history.paths[-1], digest_of(call.prefill)) if call.prefill else history.paths[-1],
        context_ids=context_ids,
        token_ids=session.tree.prompt(match.parent, context_ids),
        opens_reasoning=opens_reasoning and not call.prefill,
    )


async def _render(
    render: Callable[[Sequence[Message], list[dict[str, Any]], dict[str, Any]], list[int]],
    messages: list[Message],
    tools: list[dict[str, Any]],
    template_kwargs: dict[str, Any],
) -> list[int]:
    if sum(len(message["content"]) for message in messages) > _OFFLOAD_CHARS:
        return await asyncio.to_thread(render, messages, tools, template_kwargs)
    return render(messages, tools, template_kwargs)
