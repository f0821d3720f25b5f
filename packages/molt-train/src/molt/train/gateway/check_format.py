"""Whether the parser reads what the chat template writes: asked once, before anything is spent.

Where the two disagree a run looks alive and learns nothing: calls come out as text, the agent does nothing, and scores
sink below the base model's. So a conversation is rendered as the policy would sample it, read back, and compared.
"""

import logging
from collections.abc import Sequence
from typing import Any

import msgspec

from molt.train.gateway.call import (
    Content,
    Event,
    Message,
    Reasoning,
    ToolCallArguments,
    ToolCallEnd,
    ToolCallStart,
)
from molt.train.gateway.detokenize import TokenReader, hidden_tokens
from molt.train.gateway.parse import Parser
from molt.train.gateway.render import ChatRenderer, RenderError

log = logging.getLogger(__name__)

_USER: Message = {"role": "user", "content": "What is there?"}
_THOUGHT, _ANSWER = "First I look, then I say.", "Here it is."
_QUERY = 'say "hé" \\ 你好 <b>😀</b>\nand more'
_TYPES = {"query": "string", "limit": "integer", "ratio": "number", "deep": "object"}
_TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "look_up",
            "description": "Look something up.",
            "parameters": {"type": "object", "properties": {key: {"type": kind} for key, kind in _TYPES.items()}},
        },
    }
]


class FormatError(ValueError):
    """The parser does not read what the template writes. Says what was written, and what was read."""


def check_format(renderer: ChatRenderer, parser: Parser) -> None:
    """Render tool calls and reasoning as a reply, and parse them back.

    What the template cannot write at all is not checked, and logged: a template without tools is as good as any for
    agents that use none.

    Raises:
        FormatError: What came back is not what was written.
    """
    _check_reasoning(renderer, parser)
    if not renderer.knows_tools:
        log.info("the chat template has no place for tools: requests with tools will be refused")
        return
    both = _probe_calls(renderer)
    for calls in (both, both[:1]):  # some templates write one call a turn
        written = _write(renderer, {"content": "", "tool_calls": [_call(*call) for call in calls]}, _TOOLS)
        if written is not None:
            break
    else:
        log.warning("the chat template writes no tool calls into a reply: its tool format is not checked")
        return
    read = _calls(_read(renderer, parser, written, _TOOLS))
    if read != calls:
        raise FormatError(f"writes a tool call as {renderer.decode(written)!r}, which is read as {read!r}")


def _probe_calls(renderer: ChatRenderer) -> list[tuple[str, dict[str, Any]]]:
    """Two calls with all that JSON knows, and every kind of character that the tokenizer can write."""
    query = "".join(char for char in _QUERY if renderer.decode(renderer.encode(char)) == char)
    arguments = {"query": query, "limit": 3, "ratio": -0.5, "deep": {"list": [1, {"key": None}], "on": True}}
    return [("look_up", arguments), ("look_up", {"query": "{}"})]


def _check_reasoning(renderer: ChatRenderer, parser: Parser) -> None:
    written = _write(renderer, {"content": _ANSWER, "reasoning_content": _THOUGHT}, [])
    if written is None or _THOUGHT not in renderer.decode(written):
        return
    events = _read(renderer, parser, written, [])
    reasoning = "".join(event.text for event in events if isinstance(event, Reasoning)).strip()
    content = "".join(event.text for event in events if isinstance(event, Content)).strip()
    if (reasoning, content) != (_THOUGHT, _ANSWER):
        text = renderer.decode(written)
        raise FormatError(f"writes reasoning as {text!r}, which is read as reasoning {reasoning!r}, text {content!r}")


def _write(renderer: ChatRenderer, message: Message, tools: list[dict[str, Any]]) -> list[int] | None:
    try:
        return renderer.reply([_USER], {"role": "assistant", **message}, tools)
    except RenderError:
        return None


def _read(renderer: ChatRenderer, parser: Parser, token_ids: Sequence[int], tools: list[dict[str, Any]]) -> list[Event]:
    prompt = renderer.first_prompt([_USER], tools, {})
    opener = parser.opens_reasoning
    reading = parser.start(
        offers_tools=bool(tools),
        in_reasoning=bool(opener) and renderer.decode(prompt[-8:]).rstrip().endswith(opener),
        tools=tools,
        prompt_end=prompt[-64:],
    )
    reader = TokenReader(reading, decode=renderer.decode, hidden=hidden_tokens(renderer, parser))
    return [event for token_id in token_ids for event in reader.feed([token_id])] + reader.finish(None)


def _calls(events: Sequence[Event]) -> list[tuple[str, Any]]:
    """Names and arguments of the calls; arguments stay text where the call has no end."""
    calls: list[tuple[str, Any]] = []
    for event in events:
        match event:
            case ToolCallStart(name):
                calls.append((name, ""))
            case ToolCallArguments(text):
                name, arguments = calls.pop()
                calls.append((name, arguments + text))
            case ToolCallEnd():
                name, arguments = calls.pop()
                calls.append((name, msgspec.json.decode(arguments)))
            case _:
                pass
    return calls


def _call(name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    return {"id": "call00001", "type": "function", "function": {"name": name, "arguments": arguments}}
