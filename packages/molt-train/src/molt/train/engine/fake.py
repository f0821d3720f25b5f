r"""The scripted engine: an `Engine` that samples what a script says, and logs what it was given and what it gave.

A script is JSONL. A line answers one engine call:

    {"match": "weather", "text": "<tool_call>\n{...}\n</tool_call>", "chunks": [3, 1], "chunk_delay_s": 0.1}

Lines with a `match` (a regular expression, searched in the newest user or tool text of the prompt) are tried first, in
file order. Lines of one match form a queue, used in order; its last line repeats. Lines without one form another queue.
"""

import asyncio
import itertools
import re
from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import IO, Literal

import msgspec
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from molt.train.engine.protocol import EngineChunk, EngineFinish, EngineRequest
from molt.train.errors import ConfigError, EngineDeadError, EngineError, EngineOverloadedError, EngineRequestError

_TURN_START, _TURN_END = "<|im_start|>", "<|im_end|>"
_TOOL_TEXT = re.compile(r"<tool_response>\n(.*?)\n</tool_response>", re.DOTALL)


class ScriptLine(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What one engine call samples."""

    match: str | None = None
    text: str | None = None
    """Encoded with the engine's tokenizer; with `stop` the end token follows as the last sampled token."""
    token_ids: list[int] | None = None
    """Sampled verbatim, instead of `text`."""
    finish_reason: Literal["stop", "length"] = "stop"
    chunks: list[int] = []
    """Token counts of the streamed chunks; tokens beyond them come in one more. Empty: a chunk a token."""
    delay_s: float = 0.0
    """Seconds before the first chunk."""
    chunk_delay_s: float = 0.0
    """Seconds before each later chunk."""
    logprob: float = -1.0
    """Of every sampled token."""
    version: str | int = "0"
    """Policy version of every sampled token; a label that is no number is recorded as version 0."""
    error: Literal["dead", "overloaded"] | None = None
    """Fail this one call: after the tokens of `text` or `token_ids`, or before the first where there are none."""

    def __post_init__(self) -> None:
        if self.text is not None and self.token_ids is not None:
            raise ValueError("text and token_ids exclude each other: keep one")
        if self.text is None and self.token_ids is None and self.error is None:
            raise ValueError("one of text, token_ids and error is needed")
        if any(size < 1 for size in self.chunks):
            raise ValueError(f"chunks must be token counts of 1 or more, not {self.chunks}")
        if self.match is not None:
            try:
                re.compile(self.match)
            except re.error as error:
                raise ValueError(f"match {self.match!r} is no regular expression: {error}") from None

    @property
    def policy_version(self) -> int:
        """`version` as the records carry it."""
        return int(self.version) if str(self.version).isdecimal() else 0


class _LogLine(msgspec.Struct, kw_only=True):
    request_id: str
    prompt_token_ids: list[int]
    token_ids: list[int]
    logprobs: list[float]
    version: str | int
    finish_reason: str | None
    aborted: bool


def read_script(path: str | Path) -> list[ScriptLine]:
    """The lines of a script file; blank lines are skipped.

    Raises:
        ConfigError: The file is missing, or a line is not a valid script line (the message has file and line number).
    """
    path = Path(path)
    try:
        rows = path.read_bytes().splitlines()
    except OSError as error:
        raise ConfigError(f"script {str(path)!r} cannot be read: {error.strerror}; give a JSONL file") from None
    lines = []
    for number, row in enumerate(rows, start=1):
        if row.strip():
            try:
                lines.append(msgspec.json.decode(row, type=ScriptLine))
            except msgspec.DecodeError as error:
                raise ConfigError(f"{path}:{number}: {error}") from None
    return lines


class ScriptedEngine:
    """An `Engine` that follows a script.

    Like vLLM it ends at `max_tokens`, at the context window, and at the stop string that completes first. What else a
    request asks of the sampling (temperature, logit bias, grammar, ...) has no effect on what the script says.
    """

    def __init__(
        self,
        script: Iterable[ScriptLine],
        model_path: str | Path,
        *,
        max_model_len: int = 32768,
        log_path: str | Path | None = None,
    ) -> None:
        """Take `script`, a folder with `tokenizer.json` and `tokenizer_config.json`, and where to log calls as JSONL.

        Raises:
            ConfigError: The folder has no tokenizer, or the tokenizer no end token.
        """
        self.tokenizer, self._end_token_id = _load_tokenizer(Path(model_path))
        self._vocab_size = self.tokenizer.get_vocab_size()
        self._max_model_len = max_model_len
        self._queues: dict[str | None, list[ScriptLine]] = {}
        for line in script:
            self._queues.setdefault(line.match, []).append(line)
        self._patterns = {match: re.compile(match) for match in self._queues if match is not None}
        self._used: dict[str | None, int] = dict.fromkeys(self._queues, 0)
        self._running: dict[str, asyncio.Event] = {}
        self._log: IO[bytes] | None = Path(log_path).open("ab", buffering=0) if log_path else None  # noqa: SIM115 - closed by close()
        self._encode = lru_cache(lambda text: self.tokenizer.encode(text, add_special_tokens=False).ids)
        self._encoder = msgspec.json.Encoder()

    def close(self) -> None:
        """Close the log."""
        if self._log:
            self._log.close()

    async def generate(self, request: EngineRequest) -> EngineChunk:
        """The whole generation at once. See `Engine.generate`."""
        line = self._next_line(request.prompt_token_ids)
        if not (line.delay_s or line.chunk_delay_s or line.error):
            return self._at_once(line, request)
        chunks = [chunk async for chunk in self._run(line, request, streamed=False)]
        if len(chunks) == 1:
            return chunks[0]
        return EngineChunk(
            token_ids=[token for chunk in chunks for token in chunk.token_ids],
            logprobs=[logprob for chunk in chunks for logprob in chunk.logprobs],
            versions=[version for chunk in chunks for version in chunk.versions],
            finish_reason=chunks[-1].finish_reason,
            stop_string=chunks[-1].stop_string,
            top_logprobs=[top for chunk in chunks for top in chunk.top_logprobs],
        )

    def stream(self, request: EngineRequest) -> AsyncGenerator[EngineChunk]:
        """The generation chunk by chunk. See `Engine.stream`."""
        return self._run(self._next_line(request.prompt_token_ids), request, streamed=True)

    async def abort(self, request_id: str) -> None:
        """Stop a running call: it ends with what it has sampled, `finish_reason` abort. Unknown ids are ignored."""
        if aborted := self._running.get(request_id):
            aborted.set()

    def _at_once(self, line: ScriptLine, request: EngineRequest) -> EngineChunk:
        """What a line says that neither waits nor fails: nobody can abort it."""
        token_ids, finish, stop_string = self._sample(line, request)
        self._write_log(request, line, token_ids, finish)
        return EngineChunk(
            token_ids=token_ids,
            logprobs=[line.logprob] * len(token_ids),
            versions=[line.policy_version] * len(token_ids),
            finish_reason=finish,
            stop_string=stop_string,
            top_logprobs=self._alternatives(token_ids, line.logprob, request.num_top_logprobs),
        )

    async def _run(self, line: ScriptLine, request: EngineRequest, *, streamed: bool) -> AsyncGenerator[EngineChunk]:
        token_ids, finish, stop_string = self._sample(line, request)
        aborted = self._running[request.request_id] = asyncio.Event()
        num_sampled, ended, version = 0, None, line.policy_version
        try:
            for start, end in self._cuts(line, len(token_ids), streamed=streamed):
                delay_s = line.chunk_delay_s if start else line.delay_s
                if delay_s > 0:
                    await _set_within(aborted, delay_s)
                elif streamed:
                    await asyncio.sleep(0)
                if aborted.is_set():
                    ended = "abort"
                    yield EngineChunk(token_ids=[], logprobs=[], versions=[], finish_reason="abort")
                    return
                if start == end and line.error is not None:
                    break
                num_sampled = end
                last = end == len(token_ids) and line.error is None
                ended = finish if last else None
                yield EngineChunk(
                    token_ids=token_ids[start:end],
                    logprobs=[line.logprob] * (end - start),
                    versions=[version] * (end - start),
                    finish_reason=finish if last else None,
                    stop_string=stop_string if last else None,
                    top_logprobs=self._alternatives(token_ids[start:end], line.logprob, request.num_top_logprobs),
                )
            if line.error is not None:
                ended = "error"
                raise EngineDeadError("scripted") if line.error == "dead" else EngineOverloadedError("scripted")
        finally:
            del self._running[request.request_id]
            self._write_log(request, line, token_ids[:num_sampled], ended)

    def _next_line(self, prompt_token_ids: Sequence[int]) -> ScriptLine:
        chosen = None
        if self._patterns:
            text = self._newest_text(prompt_token_ids)
            chosen = next((match for match, pattern in self._patterns.items() if pattern.search(text)), None)
        queue = self._queues.get(chosen)
        if queue is None:
            raise EngineError("no line of the script matches the prompt: add one without match")
        line = queue[min(self._used[chosen], len(queue) - 1)]
        self._used[chosen] += 1
        return line

    def _newest_text(self, prompt_token_ids: Sequence[int]) -> str:
        """Text of the last user or tool message of a ChatML prompt; of any other prompt, all of it."""
        start_id = self.tokenizer.token_to_id(_TURN_START)
        end = len(prompt_token_ids)
        for start in range(len(prompt_token_ids) - 1, -1, -1):
            if prompt_token_ids[start] != start_id:
                continue
            role, _, text = self._decode(prompt_token_ids[start:end]).removeprefix(_TURN_START).partition("\n")
            if role in ("user", "tool"):
                tool_texts = _TOOL_TEXT.findall(text)
                return tool_texts[-1] if tool_texts else text.partition(_TURN_END)[0]
            end = start
        return self._decode(prompt_token_ids)

    def _sample(self, line: ScriptLine, request: EngineRequest) -> tuple[list[int], EngineFinish, str | None]:
        limit = min(request.sampling.max_tokens, self._max_model_len - len(request.prompt_token_ids))
        if limit < 1:
            raise EngineRequestError(
                f"no room to sample: {len(request.prompt_token_ids)} of {self._max_model_len} tokens used"
            )
        token_ids = list(line.token_ids or ())
        if line.text is not None:
            token_ids = list(self._encode(line.text))
            if line.finish_reason == "stop" and line.error is None:
                token_ids.append(self._end_token_id)
        finish: EngineFinish = line.finish_reason
        if len(token_ids) > limit:
            token_ids, finish = token_ids[:limit], "length"
        num_tokens, stop_string = self._find_stop(token_ids, request.sampling.stop)
        if stop_string is not None:
            token_ids, finish = token_ids[:num_tokens], "stop"
        return token_ids, finish, stop_string

    def _alternatives(self, token_ids: list[int], logprob: float, number: int) -> list[list[tuple[int, float]]]:
        """For each token itself and those of the next ids, each a nat less likely than the one before."""
        size = self._vocab_size
        return [[((token + i) % size, logprob - i) for i in range(number)] for token in token_ids] if number else []

    def _find_stop(self, token_ids: list[int], stops: tuple[str, ...]) -> tuple[int, str | None]:
        """How many tokens are sampled until a stop string is whole, and which one: the one that completes first."""
        if not stops:
            return 0, None
        stream, text = DecodeStream(skip_special_tokens=False), ""
        for num_tokens, token_id in enumerate(token_ids, start=1):
            if token_id == self._end_token_id:
                break
            text += stream.step(self.tokenizer, token_id) or ""
            found = [(text.find(stop) + len(stop), order) for order, stop in enumerate(stops) if stop in text]
            if found:
                return num_tokens, stops[min(found)[1]]
        return 0, None

    def _cuts(self, line: ScriptLine, num_tokens: int, *, streamed: bool) -> Iterable[tuple[int, int]]:
        """Token ranges of the chunks. A whole reply without delays between them needs no cutting."""
        if not num_tokens:
            return [(0, 0)]
        if not streamed and not line.chunk_delay_s:
            return [(0, num_tokens)]
        sizes = line.chunks or [1] * num_tokens
        ends = [end for end in itertools.accumulate(sizes) if end < num_tokens]
        return itertools.pairwise([0, *ends, num_tokens])

    def _write_log(self, request: EngineRequest, line: ScriptLine, token_ids: list[int], ended: str | None) -> None:
        if self._log is None:
            return
        row = _LogLine(
            request_id=request.request_id,
            prompt_token_ids=request.prompt_token_ids,
            token_ids=token_ids,
            logprobs=[line.logprob] * len(token_ids),
            version=line.version,
            finish_reason=ended or "abort",
            aborted=ended in (None, "abort"),
        )
        self._log.write(self._encoder.encode(row) + b"\n")

    def _decode(self, token_ids: Sequence[int]) -> str:
        return self.tokenizer.decode(list(token_ids), skip_special_tokens=False)


async def _set_within(event: asyncio.Event, seconds: float) -> None:
    """Wait until an event is set, or so many seconds."""
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await event.wait()


def _load_tokenizer(folder: Path) -> tuple[Tokenizer, int]:
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ConfigError(f"model.path {str(folder)!r} has no tokenizer.json: give the folder of a fast tokenizer")
    tokenizer = Tokenizer.from_file(str(path))
    config_path = folder / "tokenizer_config.json"
    end = msgspec.json.decode(config_path.read_bytes()).get("eos_token") if config_path.is_file() else None
    token = end.get("content") if isinstance(end, dict) else end
    token_id = tokenizer.token_to_id(token) if token else None
    if token_id is None:
        raise ConfigError(f"model.path {str(folder)!r} names no eos_token in tokenizer_config.json: add one")
    return tokenizer, token_id
