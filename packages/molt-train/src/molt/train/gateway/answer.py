"""Answering one model call: wait for a slot, sample, and hand the reply over, whole or as it is sampled."""

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing

from molt.train.config.sections import GatewayConfig
from molt.train.gateway.call import Dialect, ModelCall, ReplyEncoder, Step
from molt.train.gateway.call_error import CallError
from molt.train.gateway.exchange import Exchange
from molt.train.gateway.generate import CallContext, Run, new_reply
from molt.train.gateway.prompt import Model, Prompt, prepare
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
        runs: list[Run] = []

        async def left() -> None:
            await asyncio.sleep(settings.grace_s)
            for run in runs:
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
                await self._send_empty(exchange, call, dialect, prompt)
                return
            context = CallContext(
                model=model, settings=settings, session=session, dialect=dialect, call=call, client=exchange.client
            )
            runs += [Run(context, prompt, choice=choice) for choice in range(call.num_choices)]
            await (_stream if call.stream else _whole)(exchange, runs, encoder)
        self._seconds.labels(dialect.wire).observe(time.perf_counter() - started)
        self._tokens.labels(dialect.wire).inc(sum(len(run.reply.token_ids) for run in runs))

    async def _send_empty(self, exchange: Exchange, call: ModelCall, dialect: Dialect, prompt: Prompt) -> None:
        """Answer a call for no tokens, by which clients fill caches: nothing is sampled, nothing recorded."""
        encoder = dialect.encoder(call, lambda _: "")
        reply = new_reply(self._model, call, dialect, exchange.request_id, prompt)
        reply.finish_reason = "length"
        if call.stream:
            await exchange.write_last(encoder.start([reply]) + encoder.finish([reply]))
            await exchange.end()
        else:
            await exchange.respond(200, encoder.whole([reply]))


async def _whole(exchange: Exchange, runs: list[Run], encoder: ReplyEncoder) -> None:
    async with aclosing(_steps(runs)) as steps:
        async for _ in steps:
            pass
    body = encoder.whole([run.reply for run in runs])
    if await _is_there(exchange):
        await exchange.respond(200, body)
        for run in runs:
            run.delivered()


async def _stream(exchange: Exchange, runs: list[Run], encoder: ReplyEncoder) -> None:
    unsent = b""
    begun = False
    replies = [run.reply for run in runs]
    async with aclosing(_steps(runs)) as steps:
        async for step in steps:
            if not begun:
                unsent, begun = encoder.start(replies), True
            unsent += encoder.step(step)
            if unsent and not all(run.recorded for run in runs):
                await exchange.write(unsent)
                unsent = b""
    await exchange.write_last(unsent + encoder.finish(replies))
    if await _is_there(exchange):
        for run in runs:
            run.delivered()
    await exchange.end()


async def _steps(runs: list[Run]) -> AsyncGenerator[Step]:
    """What the runs sample, as it comes. One that fails ends them all."""
    if len(runs) == 1:
        async with aclosing(runs[0].steps()) as steps:
            async for step in steps:
                yield step
        return
    queue: asyncio.Queue[Step | None] = asyncio.Queue()

    async def pump(run: Run) -> None:
        try:
            async with aclosing(run.steps()) as steps:
                async for step in steps:
                    queue.put_nowait(step)
        finally:
            queue.put_nowait(None)

    tasks = [asyncio.create_task(pump(run)) for run in runs]
    try:
        left = len(tasks)
        while left:
            step = await queue.get()
            if step is not None:
                yield step
                continue
            left -= 1
            for task in tasks:
                if task.done() or not left:
                    await task
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _is_there(exchange: Exchange) -> bool:
    """Whether the client is still there, after the event loop has had a turn to notice that it is not."""
    await asyncio.sleep(0)
    return not exchange.gone
