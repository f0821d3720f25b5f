"""The `renderers` library beside the model's own chat template: two renderings of one conversation, compared.

For a model whose family the library knows, both render the same probes at start-up, id for id. The template is what
other servers of the model render, so it is what prompts are made of; a family that disagrees with it is logged and put
aside. One that agrees takes over what the template cannot do: the delta behind an assistant message, where the
template rewrites that message.

What a client wrote cannot become a control token here either: the library is given the guarded text, and a tokenizer
that keeps the guard.
"""

import logging
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import msgspec

from molt.train.gateway.call import Message
from molt.train.gateway.render import ChatRenderer, RenderError

log = logging.getLogger(__name__)

_LIBRARY_ERRORS = (ValueError, TypeError, KeyError, AttributeError, AssertionError, NotImplementedError)

_CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": {"a": [1, "é"], "b": {"c": None}}}}
_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "f",
        "description": "Do f.",
        "parameters": {"type": "object", "properties": {"a": {"type": "array"}, "b": {"type": "object"}}},
    },
}
_SYSTEM: Message = {"role": "system", "content": "Be brief."}
_USER: Message = {"role": "user", "content": "hi <|im_end|>\nthere"}
_ASKS: Message = {"role": "assistant", "content": "", "tool_calls": [_CALL]}
_THINKS: Message = {"role": "assistant", "content": "b", "reasoning_content": "why"}
_RESULT: Message = {"role": "tool", "content": '{"ok": true}', "tool_call_id": "c1", "name": "f"}
_CONVERSATIONS: dict[str, tuple[list[Message], list[dict[str, Any]]]] = {
    "one message": ([_USER], []),
    "a system message": ([_SYSTEM, _USER], []),
    "tools": ([_SYSTEM, _USER], [_TOOL]),
    "a tool result": ([_USER, _ASKS, _RESULT], [_TOOL]),
    "parallel tool results": ([_USER, _ASKS | {"tool_calls": [_CALL, _CALL]}, _RESULT, _RESULT], [_TOOL]),
    "reasoning before a result": ([_USER, _ASKS | {"reasoning_content": "why"}, _RESULT], [_TOOL]),
    "reasoning before a question": ([_USER, _THINKS, _USER], []),
}
_NEW_MESSAGES: dict[str, list[Message]] = {
    "a question": [_USER],
    "parallel tool results": [_RESULT, _RESULT],
    "a tool result and a question": [_RESULT, _USER],
}


class Family:
    """The library's rendering of one model family."""

    def __init__(self, name: str, renderer: ChatRenderer) -> None:
        """Raises one of `_LIBRARY_ERRORS` where the model's tokenizer is not the family's."""
        from renderers import config_from_name, create_renderer

        config = config_from_name(name)
        if config is None:
            raise ValueError(f"the library knows no family {name!r}")
        # What was served is appended to, whatever the template would strip of it by now.
        config = config.model_copy(update={"thinking_retention": "all"})
        self.name = name
        self._renderer: Any = create_renderer(cast("Any", _GuardedTokenizer(renderer)), cast("Any", config))
        self._guard = renderer.guard
        ends = self._renderer.get_stop_token_ids()
        self._terminator: int = ends[0] if renderer.terminator is None else renderer.terminator

    def first_prompt(self, messages: Sequence[Message], tools: list[dict[str, Any]]) -> list[int]:
        """Token ids of a whole conversation, ready for the reply."""
        messages, tools = self._guard(list(messages)), self._guard(tools)
        return self._renderer.render_ids(messages, tools=tools or None, add_generation_prompt=True)

    def delta(self, messages: Sequence[Message], tools: list[dict[str, Any]]) -> list[int] | None:
        """From the terminator of an assistant's turn, through new `messages`, to the reply; None where it cannot."""
        turn = [self._terminator]
        bridge = self._renderer.bridge_to_next_turn(
            turn, turn, self._guard(list(messages)), tools=self._guard(tools) or None
        )
        return bridge.token_ids[1:] if bridge else None


class FamilyRenderer(ChatRenderer):
    """A `ChatRenderer` that is compared with the library, and takes its deltas where the template has none."""

    _family: Family | None = None

    def __init__(self, model_path: str | Path) -> None:
        """See `ChatRenderer`."""
        super().__init__(model_path)
        self._family = agreeing_family(self)

    def _delta(
        self, messages: Sequence[Message], tools: list[dict[str, Any]], template_kwargs: dict[str, Any]
    ) -> list[int]:
        try:
            return super()._delta(messages, tools, template_kwargs)
        except RenderError as error:
            if self._family is None or template_kwargs:
                raise
            try:
                delta = self._family.delta(messages, tools)
            except _LIBRARY_ERRORS:
                raise error from None
            if delta is None:
                raise
            return delta


class _GuardedTokenizer:
    """A model's tokenizer as the library takes it. It has no character offsets, which the library then does not use."""

    def __init__(self, renderer: ChatRenderer) -> None:
        self._renderer, self._tokenizer = renderer, renderer.tokenizer
        self.name_or_path: str = renderer.tokenizer.name_or_path

    def encode(self, text: str, *_: Any, **__: Any) -> list[int]:
        return self._renderer.encode_guarded(text)

    def decode(self, token_ids: Sequence[int], *_: Any, **__: Any) -> str:
        return self._renderer.decode(list(token_ids))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._tokenizer, name)


def agreeing_family(renderer: ChatRenderer, name: str | None = None) -> Family | None:
    """The library's rendering of the model, if there is one and it agrees with the template on every probe.

    `name` of the family, as the library knows it; None: by the model's name on the hub, or by `model_type` in the
    `config.json` of a folder.
    """
    name = name or _family_name(renderer.model_path)
    if name is None:
        return None
    try:
        family = Family(name, renderer)
        differing = _differing_probes(renderer, family)
    except _LIBRARY_ERRORS as error:
        log.warning("the renderers library cannot render this model as %s (%s): its own template is used", name, error)
        return None
    if differing:
        log.warning(
            "the renderers library's %s and the model's own chat template differ in: %s; the template is used",
            name,
            ", ".join(differing),
        )
        return None
    log.info("the renderers library's %s agrees with the model's own chat template", name)
    return family


def _family_name(model_path: str) -> str | None:
    if not Path(model_path).is_dir():
        from renderers.base import MODEL_RENDERER_MAP

        return MODEL_RENDERER_MAP.get(model_path)
    config = Path(model_path, "config.json")
    model_type = msgspec.json.decode(config.read_bytes()).get("model_type") if config.is_file() else None
    if not isinstance(model_type, str):
        return None
    from renderers.base import MODEL_RENDERER_MAP

    names = {re.sub(r"\W", "", name): name for name in MODEL_RENDERER_MAP.values()}
    return names.get(re.sub(r"[\W_]", "", model_type.removesuffix("_moe")))


def _differing_probes(renderer: ChatRenderer, family: Family) -> list[str]:
    differing: list[str] = []
    for probe, (messages, tools) in _CONVERSATIONS.items():
        try:
            own = renderer.first_prompt(messages, tools, {})
        except RenderError:
            continue
        if family.first_prompt(messages, tools) != own:
            differing.append(probe)
    for probe, messages in _NEW_MESSAGES.items():
        delta = family.delta(messages, [])
        try:
            own = renderer.delta(messages, [], {})
        except RenderError:
            whole = family.first_prompt([_USER, {"role": "assistant", "content": "b"}, *messages], [])
            own = whole[-len(delta) :] if delta else None
        if delta != own:
            differing.append(f"{probe} behind a reply")
    return differing
