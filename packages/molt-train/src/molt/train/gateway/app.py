"""The model endpoint under a session URL, as a raw ASGI application.

    HEAD, GET  /s/{session}                            200, no body, no key, whether the session exists or not
    POST       /s/{session}/v1/chat/completions        OpenAI Chat Completions
    POST       /s/{session}/v1/messages                Anthropic Messages
    POST       /s/{session}/v1/messages/count_tokens
    GET        /s/{session}/v1/models[/{model}]        in the shape of either vendor
"""

import asyncio
import time
from contextlib import aclosing
from typing import Protocol

from molt.train.config.sections import GatewayConfig
from molt.train.engine.protocol import Engine
from molt.train.gateway.call import Dialect, ModelCall, Reply
from molt.train.gateway.exchange import Exchange, Receive, Scope, Send
from molt.train.gateway.faults import Fault
from molt.train.gateway.generate import Run
from molt.train.gateway.models import model_list, model_object
from molt.train.gateway.parse import Parser
from molt.train.gateway.prompt import Model, prepare
from molt.train.gateway.render import Renderer
from molt.train.gateway.sessions import Session, Sessions
from molt.train.gateway.wires.chat import ChatDialect
from molt.train.gateway.wires.messages import MessagesDialect

PREFIX = "/s/"
_WIRES: dict[str, Dialect] = {"/v1/chat/completions": ChatDialect(), "/v1/messages": MessagesDialect()}
_COUNT_TOKENS = "/v1/messages/count_tokens"
_MODELS = "/v1/models"


class Observer(Protocol):
    """Where the gateway's counts and timings go."""

    def count(self, name: str, value: int = 1) -> None:
        """Add `value` to the counter `name`."""
        ...

    def time(self, name: str, seconds: float) -> None:
        """Note one duration under `name`."""
        ...


class _Silent:
    def count(self, name: str, value: int = 1) -> None: ...

    def time(self, name: str, seconds: float) -> None: ...


class Gateway:
    """Serves the policy to the sessions' clients, and records what they sample."""

    def __init__(
        self,
        sessions: Sessions,
        *,
        engine: Engine,
        renderer: Renderer,
        parser: Parser,
        settings: GatewayConfig,
        model_name: str,
        max_model_len: int,
        observer: Observer | None = None,
    ) -> None:
        """Take the parts; `max_model_len` is the context window in tokens."""
        self._sessions = sessions
        marks = {renderer.control_tokens.get(mark) for mark in parser.marks}
        self._model = Model(
            engine=engine,
            renderer=renderer,
            parser=parser,
            max_model_len=max_model_len,
            hidden_token_ids=(renderer.hidden_token_ids | renderer.end_token_ids) - marks,
        )
        self._settings = settings
        self._model_name = model_name
        self._created = int(time.time())
        self._observer: Observer = observer or _Silent()

    async def asgi(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one HTTP request whose path begins with `/s/`."""
        exchange = Exchange(scope, receive, send)
        session_id, slash, rest = exchange.path.removeprefix(PREFIX).partition("/")
        route = slash + rest
        dialect = _WIRES.get(route) or _WIRES["/v1/messages" if self._is_anthropic(route, exchange) else "/v1/chat/completions"]
        try:
            if exchange.method == "OPTIONS":
                await exchange.respond(204, b"")
            elif route in ("", "/") and exchange.method in ("HEAD", "GET"):
                await exchange.respond(200, b"")
            else:
                await self._serve(exchange, self._session(session_id, exchange), route, dialect)
        except Fault as fault:
            await self._refuse(exchange, dialect, fault)
        finally:
            exchange.close()
