"""What the gateway needs of an engine, and nothing more."""

from collections.abc import AsyncGenerator
from typing import Literal, Protocol

import msgspec

EngineFinish = Literal["stop", "length", "abort"]


class Grammar(msgspec.Struct, frozen=True, kw_only=True):
    """A bound on what may be sampled, as vLLM's structured outputs take it."""

    kind: Literal["json_object", "json_schema", "regex", "choice", "grammar", "structural_tag"]
    text: str = ""
    """JSON of the schema, of the list of choices or of the structural tag; the expression; the EBNF."""


class EngineSampling(msgspec.Struct, frozen=True, kw_only=True):
    """How one call samples. Every field is always sent, so that no engine default can change the distribution.

    Recorded log-probs are of the distribution that this makes of the model's: tempered, and over the tokens that the
    truncations and the grammar leave.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """0: off."""
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    stop: tuple[str, ...] = ()
    seed: int | None = None
    logit_bias: dict[int, float] = {}
    """Added to the logits of these tokens."""
    grammar: Grammar | None = None


class EngineRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One generation."""

    request_id: str
    prompt_token_ids: list[int]
    sampling: EngineSampling
    num_top_logprobs: int = 0
    affinity: tuple[str, ...] = ()
    """Whose prefix this prompt shares, the longest first (branch, then session): the engine that served them has it."""


class EngineChunk(msgspec.Struct, frozen=True, kw_only=True):
    """Newly sampled tokens. `token_ids` and `logprobs` have one length; the last chunk says how it ended.

    `versions`, taken over all chunks of a generation, has as many entries as there are tokens. An engine may send them
    with the last chunk: that is where vLLM knows them. A sampled end token is among the tokens. The tokens of a matched
    stop string are too, and `stop_string` names it.
    """

    token_ids: list[int]
    logprobs: list[float]
    versions: list[int]
    finish_reason: EngineFinish | None = None
    stop_string: str | None = None
    num_cached_tokens: int = 0
    """Of the prompt, those that the engine had in its prefix cache."""
    top_logprobs: list[list[tuple[int, float]]] = []
    """For each token the `num_top_logprobs` likeliest at its place, best first, where the request asks for them; else
    empty. The sampled token is among them only if it is that likely."""


class Engine(Protocol):
    """A served policy. Both calls raise EngineError or one of its kinds, and nothing else."""

    async def generate(self, request: EngineRequest) -> EngineChunk:
        """The whole generation at once."""
        ...

    def stream(self, request: EngineRequest) -> AsyncGenerator[EngineChunk]:
        """The generation as it is sampled; the last chunk carries `finish_reason`."""
        ...

    async def abort(self, request_id: str) -> None:
        """Stop a generation whose reader is gone. Unknown ids are ignored."""
        ...
