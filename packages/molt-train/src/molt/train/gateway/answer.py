"""Answering one model call: wait for a slot, sample, and hand the reply over, whole or as it is sampled."""

import asyncio
import time
from contextlib import aclosing

from molt.train.config.sections import GatewayConfig
from molt.train.gateway.call import Dialect, ModelCall, Reply, ReplyEncoder
from molt.train.gateway.call_error import CallError
from molt.train.gateway.exchange import Exchange
from molt.train.gateway.generate import Run, new_reply
from molt.train.gateway.prompt import Model, prepare
from molt.train.gateway.sessions import Session
from molt.train.observe.metrics import Metrics


class Responder:
    """Answers model calls from one served policy."""

    def __init__(self, model: Model, settings: GatewayConfig, metrics: Metrics) -> None:
        self._model, self._settings = model, settings
        self._seconds = metrics.histogram("gateway_call_seconds", "Time to answer a model call", labels=("wire",))
        self._tokens = metrics.counter("gateway_sampled_tokens", "Tokens sampled for clients", labels=("wire",))

    async def answer(self, exchange: Exchange, *, session: Session, call: ModelCall, dialect: Dialect) -> None:
        """Serve one call.

        A streamed call that has to wait is kept alive. A client that goes away has `gateway.grace_s` seconds to be
        missed; then its generation is aborted.

        Raises:
            CallError: The call is refused, or failed.
        """
        started, model, settings = time.perf_counter(), self._model, self._settings
        run: Run | None = None

        async def left() -> None:
            await asyncio.sleep(settings.grace_s)
            if run:
                await run.abort()

        for note in call.notes:
            session.count(note)
        exchange.watch(left)
        if call.stream:
            exchange.keep_alive(settings.keepalive_s, dialect.keepalive)
        session.slots = session.slots or asyncio.Semaphore(settings.max_session_requests)
        async with session.slots:
            prompt = await prepare(model, session, call, dialect)
            if session.state == "closed" or exchange.gone:
                raise CallError("closed", "the session was closed, or its client gone, before the call was sampled")
            encoder = dialect.encoder(call, lambda token_id: model.renderer.decode([token_id]))
            if call.wishes.max_tokens == 0:
                reply = new_reply(model, call, dialect, exchange.request_id, prompt)
                await _send_empty(exchange, encoder, reply, stream=call.stream)
                return
            run = Run(model, session=session, call=call, dialect=dialect, prompt=prompt, settings=settings)
            await (_stream if call.stream else _whole)(exchange, run, encoder)
        self._seconds.labels(dialect.wire).observe(time.perf_counter() - started)
        self._tokens.labels(dialect.wire).inc(len(run.reply.token_ids))


async def _whole(exchange: Exchange, run: Run, encoder: ReplyEncoder) -> None:
    async with aclosing(run.steps()) as steps:
        async for _ in steps:
            pass
    body = encoder.whole(run.reply)
    if await _is_there(exchange):
        await exchange.respond(200, body)
        run.delivered()


async def _stream(exchange: Exchange, run: Run, encoder: ReplyEncoder) -> None:
    unsent = b""
    begun = False
    async with aclosing(run.steps()) as steps:
        async for step in steps:
            if not begun:
                unsent, begun = encoder.start(run.reply), True
            unsent += encoder.events(step.events, step.token_ids, step.logprobs)
            if unsent and not run.recorded:
                await exchange.write(unsent)
                unsent = b""
    await exchange.write_last(unsent + encoder.finish(run.reply))
    if await _is_there(exchange):
        run.delivered()
    await exchange.end()


async def _is_there(exchange: Exchange) -> bool:
    """Whether the client is still there, after the event loop has had a turn to notice that it is not."""
    await asyncio.sleep(0)
    return not exchange.gone


async def _send_empty(exchange: Exchange, encoder: ReplyEncoder, reply: Reply, *, stream: bool) -> None:
    """Answer a call for no tokens, by which clients fill caches: nothing is sampled, nothing recorded."""
    reply.finish_reason = "length"
    if stream:
        await exchange.write_last(encoder.start(reply) + encoder.finish(reply))
        await exchange.end()
    else:
        await exchange.respond(200, encoder.whole(reply))
