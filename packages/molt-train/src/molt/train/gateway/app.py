"""The model endpoint under a session URL, as a raw ASGI application.

HEAD, GET  /s/{session}[/api/hello]                200, no body, no key, whether the session exists or not
POST       /s/{session}/v1/chat/completions        OpenAI Chat Completions
POST       /s/{session}/v1/completions             OpenAI Completions, of raw prompts
POST       /s/{session}/v1/responses               OpenAI Responses
POST       /s/{session}/v1/messages                Anthropic Messages
POST       /s/{session}/v1/messages/count_tokens
GET        /s/{session}/v1/models[/{model}]        in the shape of either vendor
"""

import asyncio
import logging
import time
from collections.abc import Callable
from functools import partial

import msgspec

from molt.agents.protocol import SamplingParams
from molt.train.config.sections import GatewayConfig
from molt.train.engine.protocol import Engine
from molt.train.gateway.answer import Responder
from molt.train.gateway.call import Dialect, ModelCall
from molt.train.gateway.call_error import CallError
from molt.train.gateway.detokenize import hidden_tokens
from molt.train.gateway.exchange import NO_CONTENT, Exchange, Receive, Scope, Send
from molt.train.gateway.models import ServedModel
from molt.train.gateway.parse import Parser
from molt.train.gateway.prompt import Model, prepare, read_conversation
from molt.train.gateway.render import Renderer
from molt.train.gateway.routes import COUNT_TOKENS, HELLO, MESSAGES, MODELS, RESPONSES, WIRES, dialect_of, split
from molt.train.gateway.sessions import Session, Sessions
from molt.train.observe.metrics import Metrics

logger = logging.getLogger(__name__)

_OFFLOAD_BYTES = 1024 * 1024
"""A longer body is read in a thread, so that other sessions go on."""


class Gateway:
    """Serves the policy to the sessions' clients, and records what they sample."""

    def __init__(  # noqa: PLR0913 - the composition root names every part once
        self,
        sessions: Sessions,
        *,
        engine: Engine,
        renderer: Renderer,
        parser: Parser,
        settings: GatewayConfig,
        model_name: str,
        max_model_len: int,
        observer: Metrics | None = None,
    ) -> None:
        """Take the parts; `max_model_len` is the context window in tokens."""
        self._sessions = sessions
        self._settings = settings
        self._model = Model(
            name=model_name,
            engine=engine,
            renderer=renderer,
            parser=parser,
            max_model_len=max_model_len,
            hidden_token_ids=hidden_tokens(renderer, parser),
        )
        self._responder = Responder(self._model, settings, observer or Metrics())
        self._served = ServedModel(name=model_name, max_model_len=max_model_len, created=int(time.time()))
        self._nobody, _ = Sessions().open(sampling=SamplingParams(), policy="client")

    async def asgi(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one HTTP request whose path begins with `/s/`."""
        exchange = Exchange(scope, receive, send)
        session_id, route = split(exchange.path)
        dialect = dialect_of(route, exchange.headers)
        try:
            if exchange.method == "OPTIONS":
                await exchange.respond(NO_CONTENT, b"")
            elif route in ("", HELLO) and exchange.method in ("HEAD", "GET"):
                await exchange.respond(200, b"")
            else:
                await self._serve(exchange, self._session(session_id, exchange), route, dialect)
        except CallError as error:
            await _refuse(exchange, dialect, error)
        except Exception:  # the server's boundary: a client is told, whatever broke
            logger.exception("request %s failed", exchange.request_id)
            await _refuse(exchange, dialect, CallError("engine", "an error inside the gateway; its log says more"))
        finally:
            exchange.close()

    async def _serve(self, exchange: Exchange, session: Session, route: str, dialect: Dialect) -> None:
        if route in WIRES:
            _need(exchange, "POST")
            parse = partial(RESPONSES.parse, past=session.past) if dialect is RESPONSES else dialect.parse
            call = await self._read(exchange, parse)
            await self._responder.answer(exchange, session=session, call=call, dialect=dialect)
        elif route == COUNT_TOKENS:
            _need(exchange, "POST")
            call = await self._read(exchange, MESSAGES.parse_count)
            conversation = await read_conversation(session, call, MESSAGES)
            prompt = await prepare(self._model, session, call, conversation)
            await exchange.respond(200, msgspec.json.encode({"input_tokens": len(prompt.token_ids)}))
        elif route == MODELS or route.startswith(MODELS + "/"):
            _need(exchange, "GET")
            await self._models(exchange, route.removeprefix(MODELS).removeprefix("/"))
        else:
            raise CallError("not_found", f"there is no {route or '/'!r} under a session URL")

    async def _read(self, exchange: Exchange, parse: Callable[[bytes], ModelCall]) -> ModelCall:
        body = await exchange.body(self._settings.max_body_bytes)
        return parse(body) if len(body) <= _OFFLOAD_BYTES else await asyncio.to_thread(parse, body)

    async def _models(self, exchange: Exchange, name: str) -> None:
        vendor = "anthropic" if b"anthropic-version" in exchange.headers else "openai"
        if name not in ("", self._served.name):
            raise CallError("not_found", f"the model {name!r} is not served: {self._served.name!r} is")
        found = self._served.entry(vendor) if name else self._served.listing(vendor)
        await exchange.respond(200, msgspec.json.encode(found))

    def _session(self, session_id: str, exchange: Exchange) -> Session:
        """The session, if a key of the request is its key. Unknown sessions answer as wrong keys do, in equal time."""
        session = self._sessions.get(session_id)
        judge, accepted = session or self._nobody, False
        for key in _keys(exchange.headers):
            accepted |= judge.accepts(key)
        if session is None or not accepted:
            raise CallError("authentication", "the session is unknown, or the key is not its key")
        if session.state == "closed":
            raise CallError("closed", f"the session is closed: {session.closed_because}")
        return session


def _keys(headers: dict[bytes, bytes]) -> list[str]:
    """The keys that a request presents: clients use either header, and some send both with different values."""
    scheme, _, token = headers.get(b"authorization", b"").decode("latin-1").partition(" ")
    bearer = [token.strip()] if scheme.lower() == "bearer" else []
    return [*bearer, *([headers[b"x-api-key"].decode("latin-1")] if b"x-api-key" in headers else [])]


def _need(exchange: Exchange, method: str) -> None:
    if exchange.method != method and not (method == "GET" and exchange.method == "HEAD"):
        message = f"{exchange.method} is not served here: use {method}"
        raise CallError("method_not_allowed", message, allow="GET, HEAD" if method == "GET" else method)


async def _refuse(exchange: Exchange, dialect: Dialect, error: CallError) -> None:
    if exchange.gone:
        return
    if exchange.streaming:
        await exchange.write_last(exchange.failure(error, exchange.request_id))
        await exchange.end()
        return
    status, body = dialect.error(error, exchange.request_id)
    await exchange.respond(status, body, error.headers)
