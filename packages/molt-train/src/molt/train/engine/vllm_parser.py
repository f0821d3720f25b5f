"""vLLM's own parsers of replies, by name: reasoning and tool calls of the model families that it knows.

Importing them takes seconds and brings torch, so nothing is imported before a format is asked for.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

from molt.train.errors import ConfigError

if TYPE_CHECKING:
    from vllm.entrypoints.generate.base.protocol import DeltaMessage
    from vllm.parser import Parser

Part = tuple[Literal["reasoning", "content", "call", "arguments"], str]
"""More of a reply: a kind of text and the text; for `call`, the name of the tool that a new call is for."""

_HARMONY = "openai"


class VllmFormat:
    """The reply format that two of vLLM's parsers make together."""

    def __init__(self, tokenizer: Any, *, tool_parser: str = "", reasoning_parser: str = "") -> None:
        """Compose the parsers.

        Args:
            tokenizer: The model's Hugging Face tokenizer.
            tool_parser: As `vllm serve --tool-call-parser` knows it; empty: calls are text.
            reasoning_parser: As `vllm serve --reasoning-parser` knows it; empty: reasoning is text.

        Raises:
            ConfigError: There is no such parser, or it does not fit the tokenizer.
        """
        from vllm.reasoning import ReasoningParserManager
        from vllm.tool_parsers import ToolParserManager

        _check("model.tool_parser", tool_parser, ToolParserManager.list_registered())
        _check("model.reasoning_parser", reasoning_parser, ReasoningParserManager.list_registered())
        self._tokenizer = tokenizer
        self._with_calls = self._compose(tool_parser, reasoning_parser)
        self._without_calls = self._compose("", reasoning_parser)
        self.reasoning_marks = self._find_marks()
        """What opens and closes reasoning; empty where the format has no such marks."""

    def start(self, *, offers_tools: bool, tools: Sequence[dict[str, Any]], prompt_end: Sequence[int]) -> "VllmReply":
        """Begin a reply behind a prompt that ends with the tokens `prompt_end`."""
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

        request = ChatCompletionRequest.model_validate(
            {"messages": [], "tools": list(tools), "tool_choice": "auto"}
            if offers_tools and tools
            else {"messages": []}
        )
        parser = self._with_calls if offers_tools else self._without_calls
        made = parser(self._tokenizer, [*request.tools] if request.tools else None) if parser else None
        return VllmReply(made, request, list(prompt_end))

    def _compose(self, tool_parser: str, reasoning_parser: str) -> "type[Parser] | None":
        from vllm.parser import ParserManager

        try:
            return ParserManager.get_parser(
                tool_parser_name=tool_parser or None,
                reasoning_parser_name=reasoning_parser or None,
                enable_auto_tools=bool(tool_parser),
                is_harmony=tool_parser == _HARMONY,
                tokenizer=self._tokenizer,
            )
        except TypeError as error:
            raise ConfigError(f"model.tool_parser, model.reasoning_parser: {error}") from None

    def _find_marks(self) -> tuple[str, str]:
        parser = self._without_calls(self._tokenizer).reasoning_parser if self._without_calls else None
        begin = getattr(parser, "reasoning_start_str", None) or getattr(parser, "start_token", None)
        end = getattr(parser, "reasoning_end_str", None) or getattr(parser, "end_token", None)
        return (begin, end) if isinstance(begin, str) and isinstance(end, str) else ("", "")


class VllmReply:
    """The parse of one reply. Fed token by token, so that the result cannot depend on the engine's chunks."""

    def __init__(self, parser: "Parser | None", request: Any, prompt_end: list[int]) -> None:
        self._parser, self._request = parser, request
        self._prompt_end: list[int] | None = prompt_end

    def feed(self, text: str, token_ids: Sequence[int], *, is_last: bool = False) -> list[Part]:
        """What the next token says; `text` is its text, as far as it is known by now."""
        if self._parser is None:
            return [("content", text)] if text else []
        delta = self._parser.parse_delta(
            text, list(token_ids), self._request, prompt_token_ids=self._prompt_end, finished=is_last
        )
        self._prompt_end = None
        return _parts(delta) if delta else []


def _parts(delta: "DeltaMessage") -> list[Part]:
    parts: list[Part] = []
    if delta.reasoning:
        parts.append(("reasoning", delta.reasoning))
    if delta.content:
        parts.append(("content", delta.content))
    for call in delta.tool_calls or []:
        if call.function and call.function.name:
            parts.append(("call", call.function.name))
        if call.function and call.function.arguments:
            parts.append(("arguments", call.function.arguments))
    return parts


def _check(key: str, name: str, known: Sequence[str]) -> None:
    if name and name not in known:
        raise ConfigError(f"{key} is {name!r}, which vLLM does not know: give one of {', '.join(sorted(known))}")
