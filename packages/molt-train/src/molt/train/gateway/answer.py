"""Answering one model call: by the sample that an earlier call asked for, or by one of its own."""

import asyncio
import hashlib
import time
from collections.abc import Awaitable, Sequence
from contextlib import aclosing
from typing import Any

import msgspec

from molt.train.config.sections import GatewayConfig
from molt.train.gateway.attempts import Answered, Asked, Attempt
from molt.train.gateway.call import Dialect, ModelCall, Reply, SamplingWishes, Step
from molt.train.gateway.call_error import CallError
from molt.train.gateway.delivery import Delivery
from molt.train.gateway.exchange import Exchange
from molt.train.gateway.generate import CallContext, Emit, Run, new_reply
from molt.train.gateway.meters import Meters
from molt.train.gateway.prompt import (
    Conversation,
    Model,
    Prompt,
    accept,
    prepare,
    prepare_each,
    read_conversation,
    room_for,
)
from molt.train.gateway.sessions import Session
from molt.train.observe.metrics import Metrics
from molt.train.records.turn import Wire

_encode = msgspec.json.Encoder(order="deterministic").encode


class Responder:
    """Answers model calls from one served policy."""

    def __init__(self, model: Model, settings: GatewayConfig, metrics: Metrics) -> None:
        self._model, self._settings = model, settings
        self._meters = Meters(metrics)

    async def answer(self, exchange: Exchange, *, session: Session, call: ModelCall, dialect: Dialect) -> None:
        """Serve one call.

        A streamed call that has to wait is kept alive. A client that goes away has `gateway.grace_s` seconds to ask
        the same again and be given what was sampled; then the generation is aborted.

        Raises:
            CallError: The call is refused, or failed.
        """
        started = time.perf_counter()
        conversation = await read_conversation(session, call, dialect)
        encoder = dialect.encoder(call, lambda token_id: self._model.renderer.decode([token_id]))
        delivery = Delivery(exchange, encoder, dialect, stream=call.stream, tree=session.tree)
        if call.wishes.max_tokens == 0:
            await delivery.all_of([await self._no_tokens(exchange, session, call, dialect, conversation)])
            return
        delivery.keep_alive(self._settings.keepalive_s)
        asked = _asked(exchange, dialect.wire, call, conversation)
        found = session.attempts.find(asked, replay_s=self._settings.replay_s)
        if isinstance(found, Answered):
            await delivery.all_of(found.replies(), found.nodes)
        elif found is not None:
            await _follow(exchange, session, found, delivery)
        else:
            attempt = session.attempts.begin(asked, grace_s=self._settings.grace_s)
            context = CallContext(
                model=self._model,
                settings=self._settings,
                session=session,
                dialect=dialect,
                call=call,
                client=exchange.client,
            )
            attempt.join(exchange)
            await self._sample(context, attempt, conversation, delivery)
            self._meters.answered(dialect.wire, seconds=time.perf_counter() - started, replies=attempt.replies)

    async def _sample(
        self, context: CallContext, attempt: Attempt, conversation: Conversation, delivery: Delivery
    ) -> None:
        """Sample what the attempt asks for, for its own client and for those that join later."""
        session, call = context.session, context.call
        try:
            slots = await self._slot(session)
            try:
                prompts = await prepare_each(self._model, session, call, conversation)
                for prompt in prompts:
                    room_for(self._model, prompt.token_ids)  # of all, before anything of any is counted
                await call.accepted()
                if session.state == "closed" or attempt.is_given_up:
                    raise CallError("closed", "the session was closed, or its client gone, before the call was sampled")
                runs = _runs(context, prompts)
                accept(session, call, conversation, prompts)
                attempt.runs = runs
                delivery.begin(runs)

                def emit(step: Step) -> Awaitable[None] | None:
                    attempt.publish(step)
                    return delivery.step(step)

                await _sample_all(runs, emit)
            finally:
                slots.release()
            attempt.end()
            if not await delivery.finish(attempt.nodes) and not attempt.is_followed:
                session.count("replies_undelivered")
        except CallError as error:
            attempt.end(error)
            raise
        except BaseException:
            attempt.end(CallError("engine", "the gateway broke off the call that this one was joined to"))
            raise
        finally:
            session.attempts.settle(attempt)

    async def _slot(self, session: Session) -> asyncio.Semaphore:
        """Wait until the session has fewer calls under way than it may; to be released when this one is over.

        Raises:
            CallError: None ended within `gateway.hold_s`.
        """
        settings = self._settings
        slots = session.slots = session.slots or asyncio.Semaphore(settings.max_session_requests)
        try:
            if slots.locked():
                async with asyncio.timeout(settings.hold_s):
                    await slots.acquire()
            else:
                await slots.acquire()
        except TimeoutError:
            session.count("queue_expired")
            busy = f"all {settings.max_session_requests} calls that a session may have at once are under way"
            message = f"{busy} (gateway.max_session_requests), and none ended in {settings.hold_s} s (gateway.hold_s)"
            raise CallError("overloaded", message) from None
        return slots

    async def _no_tokens(
        self, exchange: Exchange, session: Session, call: ModelCall, dialect: Dialect, conversation: Conversation
    ) -> Reply:
        """The reply to a call for no tokens, by which clients fill caches: nothing is sampled, nothing recorded."""
        prompt = await prepare(self._model, session, call, conversation)
        reply = new_reply(self._model, call, dialect, exchange.request_id, prompt)
        reply.finish_reason = "length"
        return reply


async def _follow(exchange: Exchange, session: Session, attempt: Attempt, delivery: Delivery) -> None:
    """Give the client of a resend what an attempt samples that its own client has left."""
    attempt.join(exchange)
    delivery.begin(attempt.runs)
    async with aclosing(attempt.follow()) as steps:
        async for step in steps:
            if not delivery.replies:
                delivery.begin(attempt.runs)
            if sending := delivery.step(step):
                await sending
    if not await delivery.finish(attempt.nodes):
        session.count("replies_undelivered")


def _asked(exchange: Exchange, wire: Wire, call: ModelCall, conversation: Conversation) -> Asked:
    """What a request asks for, in its normal form: what has no say in the sample is not in it.

    That is how the reply is sent, marks such as `cache_control`, the client's metadata, and echoed call ids, save that
    they tell which of several equal turns is continued.
    """
    normal = (
        wire,
        call.model,
        conversation.request,
        conversation.frame,
        conversation.history.last_turn_id,
        _plain(call.wishes) if call.wishes.logit_bias else call.wishes,
        call.tool_choice,
        call.response_format,
        call.num_choices,
        call.num_top_logprobs,
        call.template_kwargs,
    )
    headers = exchange.headers
    retries = headers.get(b"x-stainless-retry-count", b"")
    return Asked(
        key=hashlib.blake2b(_encode(normal), digest_size=16).digest(),
        is_retry=retries.isdigit() and int(retries) > 0,
        name=headers.get(b"idempotency-key", b"").decode("latin-1"),
    )


def _plain(wishes: SamplingWishes) -> Any:
    return msgspec.to_builtins(wishes, str_keys=True)  # numbers, as the keys of logit_bias are, cannot be put in order


def _runs(context: CallContext, prompts: Sequence[Prompt]) -> list[Run]:
    """The choices of the first prompt, of the second, and so on: one reply to the client, under one id."""
    each = [prompt for prompt in prompts for _ in range(context.call.num_choices)]
    runs = [Run(context, prompt, choice=choice) for choice, prompt in enumerate(each)]
    for run in runs[1:]:
        run.reply.response_id = runs[0].reply.response_id
    return runs


async def _sample_all(runs: list[Run], emit: Emit) -> None:
    """Run them all. One that fails ends the others."""
    if len(runs) == 1:
        await runs[0].sample(emit)
        return
    tasks = [asyncio.create_task(run.sample(emit)) for run in runs]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
