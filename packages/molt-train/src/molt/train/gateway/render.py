"""Prompts: the model's own chat template, encoded once; later turns add only what is new.

The delta rule: a turn that continues another one is given that turn's whole token row, then the tokens of what the
template writes after an assistant message: its terminator, the new messages, the generation prompt. The row is never
encoded again, so every sampled token keeps the exact context it was sampled in.
"""

import inspect
import re
import secrets
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

import msgspec
from jinja2 import TemplateError
from transformers import PreTrainedTokenizerFast
from transformers.utils.hub import cached_file

from molt.train.errors import ConfigError
from molt.train.gateway.call import Message

_TEMPLATE_ERRORS = (TemplateError, TypeError, ValueError)
_NUM_REMEMBERED, _SHORT_BYTES = 256, 8 * 1024
"""Prompts and deltas up to this length are remembered: the rollouts of a group share many of them."""
_RESERVED = frozenset(inspect.signature(PreTrainedTokenizerFast.apply_chat_template).parameters)
_CONTROL_LOOK = re.compile(r"[<\[|].+[>\]|]", re.DOTALL)


_PROBE_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": "f", "description": "f", "parameters": {"type": "object", "properties": {}}},
}


class RenderError(ValueError):
    """The chat template cannot render these messages, or whatever else `param` names."""

    param = "messages"


class ToolsError(RenderError):
    """The chat template has no place for tools."""

    param = "tools"


class Renderer(Protocol):
    """What the gateway needs of a model's tokenizer and template."""

    end_token_ids: frozenset[int]
    """Tokens that end a reply when they are sampled."""
    control_tokens: dict[str, int]
    hidden_token_ids: frozenset[int]
    """Control tokens that are no text: turn marks, padding and the like."""
    vocab_size: int
    """One more than the largest token id."""

    def first_prompt(
        self, messages: Sequence[Message], tools: list[dict[str, Any]], template_kwargs: dict[str, Any]
    ) -> list[int]:
        """Token ids of a whole conversation, ready for the reply. Raises RenderError."""
        ...

    def delta(
        self, messages: Sequence[Message], tools: list[dict[str, Any]], template_kwargs: dict[str, Any]
    ) -> list[int]:
        """Token ids from the end of an assistant's text, through new `messages`, to the reply. Raises RenderError."""
        ...

    def encode(self, text: str) -> list[int]:
        """Token ids of plain text; what spells a control token is text."""
        ...

    def encode_raw(self, text: str) -> list[int]:
        """Token ids of a whole prompt: control tokens count as such, and a mark that begins every text is added."""
        ...

    def decode(self, token_ids: list[int]) -> str:
        """Text of tokens, control tokens spelled out."""
        ...


class ChatRenderer:
    """A `Renderer` from a Hugging Face model folder: fast tokenizer and chat template."""

    def __init__(self, model_path: str | Path) -> None:
        """Load tokenizer and template of a folder, or of a model on the hub.

        Raises:
            ConfigError: There is no fast tokenizer, or no chat template, or the template cannot render a user message.
        """
        self.model_path = str(model_path)
        self._load(self.model_path)
        # Content that spells a control token is broken after the token's first character: the halves, encoded apart,
        # cannot become the token. The break is unguessable, so no content can contain it.
        self._break = "B" + secrets.token_hex(12)
        self._sentinel = "S" + secrets.token_hex(12)
        spellings = sorted(self.control_tokens, key=len, reverse=True)
        self._spelled = re.compile("|".join(map(re.escape, spellings)) if spellings else r"(?!)")
        self._folds_system = not self._renders_late_system()
        self._short_prompt = lru_cache(_NUM_REMEMBERED)(lambda key: self._first_prompt(*msgspec.json.decode(key)))
        self._short_delta = lru_cache(_NUM_REMEMBERED)(lambda key: self._delta(*msgspec.json.decode(key)))
        self._delta_needs_tools = False
        self.knows_tools = True
        """The template has a place for tools."""
        try:
            self.first_prompt([{"role": "user", "content": "a"}], [], {})
        except RenderError as error:
            raise ConfigError(
                f"model.path {str(model_path)!r}: {error}; give a model whose template is whole"
            ) from None
        self.knows_tools = self._writes_tools()
        terminator = self._probe_delta()
        self.terminator = terminator if terminator in self.control_tokens.values() else None
        """The token by which the template ends an assistant's turn; None where it uses none, or has no delta."""
        if self.terminator is not None:
            self.end_token_ids |= {self.terminator}

    def first_prompt(
        self, messages: Sequence[Message], tools: list[dict[str, Any]], template_kwargs: dict[str, Any]
    ) -> list[int]:
        """See `Renderer.first_prompt`."""
        key = msgspec.json.encode((messages, tools, template_kwargs))
        if len(key) <= _SHORT_BYTES:
            return list(self._short_prompt(key))
        return self._first_prompt(messages, tools, template_kwargs)

    def delta(
        self, messages: Sequence[Message], tools: list[dict[str, Any]], template_kwargs: dict[str, Any]
    ) -> list[int]:
        """See `Renderer.delta`."""
        key = msgspec.json.encode((messages, tools if self._delta_needs_tools else [], template_kwargs))
        if len(key) <= _SHORT_BYTES:
            return list(self._short_delta(key))
        return self._delta(messages, tools, template_kwargs)

    def reply(self, history: Sequence[Message], message: Message, tools: list[dict[str, Any]]) -> list[int]:
        """Token ids of an assistant's `message` after `history` as the policy would sample them, end token included.

        Raises:
            RenderError: The template does not write the message behind its own generation prompt, or ends it by none
                of `end_token_ids`.
        """
        prompt = self._render(history, tools, {})
        whole = self._render([*history, message], tools, {}, add_generation_prompt=False)
        if not whole.startswith(prompt):
            raise RenderError("the chat template does not write a reply behind its own generation prompt")
        token_ids = self.encode_guarded(whole[len(prompt) :])
        end = next((index for index, token_id in enumerate(token_ids) if token_id in self.end_token_ids), None)
        if end is None:
            raise RenderError("the chat template does not end a reply by an end token of the model")
        return token_ids[: end + 1]

    def count(self, messages: Sequence[Message], tools: list[dict[str, Any]]) -> int:
        """Length of the first prompt in tokens. Raises RenderError."""
        return len(self.first_prompt(messages, tools, {}))

    def encode(self, text: str) -> list[int]:
        """See `Renderer.encode`."""
        return self.encode_guarded(self.guard(text))

    def encode_raw(self, text: str) -> list[int]:
        """See `Renderer.encode_raw`."""
        return self._backend.encode_batch_fast([text])[0].ids

    def decode(self, token_ids: list[int]) -> str:
        """See `Renderer.decode`."""
        return self._backend.decode(token_ids, skip_special_tokens=False)

    def _first_prompt(
        self, messages: Sequence[Message], tools: list[dict[str, Any]], template_kwargs: dict[str, Any]
    ) -> list[int]:
        return self.encode_guarded(self._render(messages, tools, template_kwargs))

    def _delta(
        self, messages: Sequence[Message], tools: list[dict[str, Any]], template_kwargs: dict[str, Any]
    ) -> list[int]:
        before = [{"role": "user", "content": ""}, {"role": "assistant", "content": self._sentinel}]
        text = self._render([*before, *messages], tools if self._delta_needs_tools else [], template_kwargs)
        parts = text.split(self._sentinel)
        if len(parts) != 2:
            raise RenderError("the chat template does not write an assistant's text as it is")
        return self.encode_guarded(parts[1])

    def _load(self, path: str) -> None:
        try:
            tokenizer = PreTrainedTokenizerFast.from_pretrained(path)
            generation_file = cached_file(path, "generation_config.json", _raise_exceptions_for_missing_entries=False)
        except (OSError, ValueError, TypeError) as error:
            reason = str(error).partition("\n")[0]
            raise ConfigError(f"model.path {path!r} has no fast tokenizer (tokenizer.json): {reason}") from None
        if not tokenizer.chat_template:
            raise ConfigError(
                f"model.path {path!r} has no chat template: "
                "add chat_template to tokenizer_config.json, or use a chat model"
            )
        self.tokenizer = tokenizer
        """The Hugging Face tokenizer, for libraries that want one."""
        self._backend = tokenizer.backend_tokenizer
        self.vocab_size = 1 + max(self._backend.get_vocab(with_added_tokens=True).values())
        self.control_tokens: dict[str, int] = {
            token.content: token_id
            for token_id, token in self._backend.get_added_tokens_decoder().items()
            if token.special or _CONTROL_LOOK.fullmatch(token.content)
        }
        self.hidden_token_ids = frozenset(
            token_id for token_id, token in self._backend.get_added_tokens_decoder().items() if token.special
        )
        eos = msgspec.json.decode(Path(generation_file).read_bytes()).get("eos_token_id") if generation_file else None
        ends = eos if isinstance(eos, list) else [eos]
        self.end_token_ids: frozenset[int] = frozenset(
            token_id for token_id in [*ends, tokenizer.eos_token_id] if isinstance(token_id, int)
        )

    def _writes_tools(self) -> bool:
        messages = [{"role": "user", "content": "a"}]
        try:
            return self._render(messages, [_PROBE_TOOL], {}) != self._render(messages, [], {})
        except RenderError:
            return False

    def _probe_delta(self) -> int | None:
        """Find out whether the delta depends on the tools, and which token ends an assistant message."""
        messages = [{"role": "user", "content": "a"}]
        try:
            plain = self.delta(messages, [], {})
            if self.knows_tools:
                self._delta_needs_tools = True
                self._delta_needs_tools = self.delta(messages, [_PROBE_TOOL], {}) != plain
        except RenderError:
            return None
        return plain[0] if plain else None

    def _renders_late_system(self) -> bool:
        late = {"role": "system", "content": self._sentinel}
        user, assistant = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
        self._folds_system = False
        try:
            return self._sentinel in self._render([user, assistant, late, user], [], {})
        except RenderError:
            return False

    def _render(
        self,
        messages: Sequence[Message],
        tools: list[dict[str, Any]],
        template_kwargs: dict[str, Any],
        *,
        add_generation_prompt: bool = True,
    ) -> str:
        if taken := _RESERVED & template_kwargs.keys():
            raise RenderError(f"{min(taken)!r} is no argument of a chat template")
        if tools and not self.knows_tools:
            raise ToolsError("the model's chat template has no place for tools: send none, or serve another model")
        if self._folds_system:
            messages = _fold_late_system(messages)
        try:
            return self.tokenizer.apply_chat_template(
                self.guard(list(messages)),
                tools=self.guard(tools) or None,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                **template_kwargs,
            )
        except _TEMPLATE_ERRORS as error:
            raise RenderError(f"the chat template cannot render the messages: {error}") from error

    def guard(self, value: Any) -> Any:
        """`value` with every spelled control token in its strings broken; only `encode_guarded` takes it."""
        if isinstance(value, str):
            return self._spelled.sub(lambda found: found[0][0] + self._break + found[0][1:], value)
        if isinstance(value, dict):
            return {self.guard(key): self.guard(item) for key, item in value.items()}
        return [self.guard(item) for item in value] if isinstance(value, list) else value

    def encode_guarded(self, text: str) -> list[int]:
        """Token ids of text whose control tokens count, but where the guard broke them."""
        # Where no character offsets are wanted, a batch of one is a third cheaper than a text; and unlike `encode`, it
        # lets other threads run meanwhile.
        pieces = self._backend.encode_batch_fast(text.split(self._break), add_special_tokens=False)
        return pieces[0].ids if len(pieces) == 1 else [token_id for piece in pieces for token_id in piece.ids]


def _fold_late_system(messages: Sequence[Message]) -> list[Message]:
    """Put system messages behind the first place into the neighbouring user turn, in the order sent."""
    folded: list[Message] = []
    for index, message in enumerate(messages):
        late = message["role"] == "system" and index > 0
        role = "user" if late else message["role"]
        if folded and role == "user" and folded[-1]["role"] == "user" and (late or folded[-1].get("late")):
            content = f"{folded[-1]['content']}\n\n{message['content']}"
            folded[-1] = {"role": "user", "content": content, "late": True}
        elif late:
            folded.append({"role": "user", "content": message["content"], "late": True})
        else:
            folded.append(message)
    return [{key: value for key, value in message.items() if key != "late"} for message in folded]
