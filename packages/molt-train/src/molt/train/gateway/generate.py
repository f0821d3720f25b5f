"""One path from a prompt to a recorded turn, the same for every wire, whole or streamed."""

import asyncio
import logging
import os
import time
from collections.abc import Awaitable, Callable
from contextlib import aclosing, suppress

import msgspec

from molt.train.config.sections import GatewayConfig
from molt.train.engine.protocol import EngineChunk, EngineRequest
from molt.train.errors import EngineDeadError, EngineError, EngineOverloadedError, EngineRequestError
from molt.train.gateway.call import (
    Content,
    Dialect,
    Event,
    ModelCall,
    Reasoning,
    Reply,
    Step,
    ToolCall,
    ToolCallArguments,
    ToolCallEnd,
    ToolCallStart,
)
from molt.train.gateway.call_error import CallError
from molt.train.gateway.detokenize import TokenReader
from molt.train.gateway.grammar import request_error
from molt.train.gateway.plain_text import PlainText
from molt.train.gateway.prompt import Model, Prompt, room_for
from molt.train.gateway.sampling import effective_sampling, off_policy_reasons
from molt.train.gateway.sessions import Session
from molt.train.gateway.turns import TurnNode, pack, pack_floats
from molt.train.records.turn import TurnStatus

logger = logging.getLogger(__name__)

_encode = msgspec.json.Encoder().encode

UNKNOWN_VERSION = -1
"""Of tokens whose generation was cut before the engine said which version sampled them."""
_PROMPT_END = 64
"""Tokens of the prompt's end that a parser may want to see."""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 1.0
"""Between two tries at a dead engine, doubling."""


Emit = Callable[[Step], Awaitable[None] | None]
"""Takes what was sampled. What it returns is awaited: the client has to take some of it first."""


class CallContext(msgspec.Struct, frozen=True, kw_only=True):
    """A parsed call with everything that its answer depends on."""

    model: Model
    settings: GatewayConfig
    session: Session
    dialect: Dialect
    call: ModelCall
    client: bytes
    """What its headers say of the client, as JSON."""


class Run:
    """One sample of a model call on its way through the engine.

    The turn is recorded before the last step is handed on, so that a client which has seen the end of a reply can
    continue it at once.
    """

    def __init__(self, context: CallContext, prompt: Prompt, *, choice: int = 0) -> None:
        """Check that the prompt leaves room, and choose the sampling.

        Raises:
            CallError: The prompt fills the context window.
        """
        model, session, call, dialect = context.model, context.session, context.call, context.dialect
        room = room_for(model, prompt.token_ids)
        if prompt.match.parent and session.tree.adopt(prompt.match.parent):
            session.count("adopted_though_undelivered")
        self.turn_id = os.urandom(12).hex()
        self._seed = session.tree.draw_seed(prompt.match.parent)
        self.sampling = effective_sampling(session, call.wishes, room, grammar=prompt.grammar, seed=self._seed)
        self.node: TurnNode | None = None
        """The turn, once it is recorded: nothing more will be sampled."""
        self.is_held = False
        """The engine was dead, and has not sampled since."""
        self.reply = new_reply(model, call, dialect, self.turn_id, prompt, choice=choice)
        self._client = context.client
        self._model, self._session, self._call, self._dialect = model, session, call, dialect
        self._prompt, self._settings = prompt, context.settings
        self._reading = (
            PlainText()
            if prompt.is_raw
            else model.parser.start(
                offers_tools=call.tool_choice.mode != "none" and prompt.frame.has_tools,
                max_calls=call.tool_choice.max_calls,
                in_reasoning=prompt.opens_reasoning,
                tools=prompt.tools,
                prompt_end=prompt.context_ids[-_PROMPT_END:],
            )
        )
        self._reader = TokenReader(
            self._reading,
            decode=model.renderer.decode,
            hidden=model.hidden_token_ids,
            stops=self.sampling.stop,
        )
        root = prompt.match.parent
        self._affinity = ((root.root_id if root else self.turn_id), session.session_id)
        self._versions: list[int] = []
        self._request_id = self.turn_id
        self._aborted = asyncio.Event()
        self._emitting: asyncio.Task[None] | None = None
        """The task that waits for a client to take what was sampled."""
        self._cut_off: asyncio.Task[None] | None = None
        """That task, once the wait was ended by an abort."""

    async def sample(self, emit: Emit) -> None:
        """Sample, record, and hand on what is sampled. What `emit` raises ends the run as an abort does.

        Raises:
            CallError: The engine refused the request, failed or is overloaded, or the generation was aborted.
        """
        refused = False
        self._session.begun(self)
        try:
            chunk = await self._generate(emit)
            last = self._take(chunk)
            self._settle(chunk)
        except EngineRequestError as error:
            refused = True  # nothing was sampled: there is no turn
            raise request_error(error, self._call) from error
        except EngineError as error:
            self._record("failed", "error")
            self._session.count("engine_failed")
            raise _call_error(error) from error
        except asyncio.CancelledError as cancelled:
            if (task := self._cut_off) is None or task.uncancel():
                raise
            raise self._aborted_error() from cancelled
        finally:
            self._emitting = None
            if self.node is None and not refused:
                self._record("aborted", "abort")
                await self.abort()
            self._session.ended(self)
        if sending := emit(last):
            await sending

    async def abort(self) -> None:
        """Have the engine stop; `sample` then ends in a CallError, the turn recorded as aborted."""
        self._aborted.set()
        if self._emitting and not self._cut_off:
            self._cut_off = self._emitting  # its client may never read
            self._cut_off.cancel()
        with suppress(EngineError):  # an engine that is gone has stopped, and says so to `sample`
            await self._model.engine.abort(self._request_id)

    async def _generate(self, emit: Emit) -> EngineChunk:
        """Emit all that is sampled but the last chunk, and return that.

        While the engine is dead and nothing was sampled, wait for it and ask again.
        """
        loop = asyncio.get_running_loop()
        deadline, pause = loop.time() + self._settings.hold_s, _FIRST_PAUSE_S
        attempt = 1
        while not self._aborted.is_set():
            request = EngineRequest(
                request_id=self._request_id,
                prompt_token_ids=self._prompt.token_ids,
                sampling=self.sampling,
                num_top_logprobs=self._call.num_top_logprobs,
                affinity=self._affinity,
            )
            try:
                if self._call.stream:
                    return await self._stream(request, emit)
                return await self._model.engine.generate(request)
            except EngineDeadError:
                left = deadline - loop.time()
                if self.reply.token_ids or left <= 0:
                    raise
                self.is_held = True
                self._session.count("engine_dead_held")
                await self._engine_back(min(pause, left))
                attempt, pause = attempt + 1, min(2 * pause, _LONGEST_PAUSE_S)
                self._request_id = f"{self.turn_id}-{attempt}"
        return EngineChunk(token_ids=[], logprobs=[], versions=[], finish_reason="abort")

    async def _stream(self, request: EngineRequest, emit: Emit) -> EngineChunk:
        last, task = None, asyncio.current_task()
        async with aclosing(self._model.engine.stream(request)) as chunks:
            async for chunk in chunks:
                if chunk.finish_reason is not None:
                    last = chunk
                elif sending := emit(self._take(chunk)):
                    self._emitting = task
                    await sending
                    self._emitting = None
        if last is None:
            raise EngineError("a generation ended without a finish reason")
        return last

    async def _engine_back(self, pause_s: float) -> None:
        """Wait before the engine is tried again; an abort ends the wait."""
        try:
            async with asyncio.timeout(pause_s):
                await self._aborted.wait()
        except TimeoutError:
            return

    def _take(self, chunk: EngineChunk) -> Step:
        reply = self.reply
        reply.token_ids.extend(chunk.token_ids)
        reply.logprobs.extend(chunk.logprobs)
        self._versions.extend(chunk.versions)
        if chunk.num_cached_tokens > reply.cached_tokens:
            reply.cached_tokens = chunk.num_cached_tokens
        events = self._reader.feed(chunk.token_ids)
        if chunk.finish_reason is not None:
            events += self._reader.finish(chunk.stop_string)
        if chunk.top_logprobs:
            reply.top_logprobs.extend(chunk.top_logprobs)
        seen = [self._see(event) for event in events]
        return Step(seen, chunk.token_ids, chunk.logprobs, chunk.top_logprobs, reply.choice)

    def _see(self, event: Event) -> Event:
        """Add to what the client has seen. A tool call gets its id."""
        match event:
            case Content():  # nearly all are, and to take it apart here would cost as much as all else
                self.reply.content += event.text
            case Reasoning(text):
                self.reply.reasoning += text
            case ToolCallStart(name):
                event = ToolCallStart(name, self._dialect.call_prefix + os.urandom(12).hex())
                self.reply.calls.append(ToolCall(name, event.call_id))
            case ToolCallArguments(text):
                self.reply.calls[-1].arguments += text
            case ToolCallEnd():
                self.reply.calls[-1].complete = True
        return event

    def _settle(self, chunk: EngineChunk) -> None:
        """Record the turn of a generation that has ended."""
        if chunk.finish_reason == "abort":
            self._record("aborted", "abort")
            raise self._aborted_error()
        reply = self.reply
        reply.finish_reason = chunk.finish_reason or "stop"
        reply.stop_string = chunk.stop_string
        reply.window_full = (
            reply.finish_reason == "length" and reply.prompt_tokens + len(reply.token_ids) >= self._model.max_model_len
        )
        reply.reasoning_tokens = self._num_reasoning_tokens()
        for name, value in self._reading.counters.items():
            self._session.count(name, value)
        self._record("undelivered", reply.finish_reason)

    def _aborted_error(self) -> CallError:
        if self._session.state == "closed":
            return CallError("closed", "the session is closed")
        return CallError("engine", "the generation was aborted")

    def _num_reasoning_tokens(self) -> int:
        if not self.reply.reasoning:
            return 0
        control, parser, token_ids = self._model.renderer.control_tokens, self._model.parser, self.reply.token_ids
        close = control.get(parser.closes_reasoning)
        if close in token_ids:
            return token_ids.index(close) + 1
        if not (self.reply.content or self.reply.calls):
            return len(token_ids)
        others = {control.get(mark) for mark in parser.marks if mark != parser.opens_reasoning}
        return next((index for index, token_id in enumerate(token_ids) if token_id in others), 0)  # a call ended it

    def _record(self, status: TurnStatus, finish_reason: str) -> None:
        prompt, reply = self._prompt, self.reply
        node = self.node = TurnNode(
            turn_id=self.turn_id,
            wire=self._dialect.wire,
            parent=prompt.match.parent,
            opened_by=prompt.match.opened_by,
            frame=prompt.frame,
            request=prompt.request,
            response_id=reply.response_id,
            sampling=_encode(self.sampling),
            off_policy=off_policy_reasons(self.sampling, self._session.expected_sampling),
            client=self._client,
            prompt_length=len(prompt.token_ids),
            root_id=self._affinity[0],
            context_ids=pack(prompt.context_ids),
            token_ids=pack(reply.token_ids),
            logprobs=pack_floats(reply.logprobs),
            versions=pack(self._versions + [UNKNOWN_VERSION] * (len(reply.token_ids) - len(self._versions))),
            finish_reason=finish_reason,
            status=status,
            seed=self._seed,
        )
        tree = self._session.tree
        try:
            if status != "undelivered":
                tree.add(node)
            elif fork := tree.publish(node, prompt.match, prompt.path, reply, self._call.prefill):
                self._session.count(fork)
        except OSError as error:
            self._session.count("turns_unkept")
            logger.error("turn %s cannot be kept: %s", self.turn_id, error)  # noqa: TRY400 - the reason says it all
            if status == "undelivered":
                message = f"the turn cannot be kept ({error.strerror or error}): make room in run.dir"
                raise CallError("overloaded", message) from error


def new_reply(
    model: Model, call: ModelCall, dialect: Dialect, turn_id: str, prompt: Prompt, *, choice: int = 0
) -> Reply:
    """The reply to `call` before anything is sampled."""
    return Reply(
        response_id=dialect.response_prefix + turn_id,
        choice=choice,
        model=call.model or model.name,
        created=int(time.time()),
        prompt_tokens=len(prompt.token_ids),
    )


def _call_error(error: EngineError) -> CallError:
    if isinstance(error, EngineOverloadedError):
        return CallError("overloaded", "the engine takes no more requests now")
    if isinstance(error, EngineDeadError):
        return CallError("overloaded", "the engine is gone, and was not back in time")
    return CallError("engine", f"the engine failed: {error}")
