"""A real server on loopback, real SDK clients, and the scripted engine behind the gateway."""

import asyncio
import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anthropic
import httpx
import msgspec
import openai
import pytest
import pytest_asyncio
from hypothesis import settings as hypothesis_settings

from molt.agents.protocol import SamplingParams
from molt.train.config.sections import GatewayConfig
from molt.train.engine.fake import ScriptedEngine, ScriptLine
from molt.train.engine.scripted_tokenizer import scripted_tokenizer
from molt.train.gateway.app import Gateway
from molt.train.gateway.parse import HermesParser
from molt.train.gateway.render import ChatRenderer
from molt.train.gateway.sessions import Session, Sessions
from molt.train.gateway.trace import TraceLog
from molt.train.records.turn import Turn
from molt.train.server.listen import HttpServer, bind

hypothesis_settings.register_profile("gateway", derandomize=True, deadline=None)
hypothesis_settings.load_profile("gateway")

MODEL_NAME = "policy"


@dataclass
class Caller:
    """A session with the clients that talk to it."""

    session: Session
    key: str
    url: str
    openai: openai.AsyncOpenAI
    anthropic: anthropic.AsyncAnthropic
    http: httpx.AsyncClient

    @property
    def turns(self) -> list[Turn]:
        return self.session.turns()

    async def post(self, path: str, body: Any, **headers: str) -> httpx.Response:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        auth = {"authorization": f"Bearer {self.key}", **headers}
        return await self.http.post(self.url + path, content=content, headers=auth)


class Bench:
    """The gateway under test: `serve` a script, then `call` it."""

    def __init__(self, url: str, clients: tuple[Any, Any, Any], model_path: Path, renderer: ChatRenderer, tmp: Path):
        self.url, self.model_path, self.renderer = url, model_path, renderer
        self._openai, self._anthropic, self.http = clients
        self._log = tmp / "engine.jsonl"
        self.app: Any = None
        self.serve({"text": "hello"})

    def serve(
        self,
        *lines: dict[str, Any],
        max_model_len: int = 32768,
        engine: Any = None,
        renderer: Any = None,
        traces: TraceLog | None = None,
        **settings: Any,
    ) -> None:
        script = [ScriptLine(**line) for line in lines]
        self.scripted = ScriptedEngine(script, self.model_path, max_model_len=max_model_len, log_path=self._log)
        self.sessions = Sessions(traces)
        self.gateway = Gateway(
            self.sessions,
            engine=engine or self.scripted,
            renderer=renderer or self.renderer,
            parser=HermesParser(),
            settings=GatewayConfig(**{"hold_s": 0.0, **settings}),
            model_name=MODEL_NAME,
            max_model_len=max_model_len,
        )

    def open(self, policy: Any = "client", **sampling: Any) -> Caller:
        session, key = self.sessions.open(sampling=SamplingParams(**sampling), policy=policy)
        url = f"{self.url}/s/{session.session_id}"
        return Caller(
            session,
            key,
            url,
            self._openai.copy(base_url=url + "/v1", api_key=key),
            self._anthropic.copy(base_url=url, api_key=key),
            self.http,
        )

    def encode(self, text: str) -> list[int]:
        """Ids of a text whose control tokens count as such."""
        return self.scripted.tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, token_ids: list[int]) -> str:
        return self.renderer.decode(token_ids)

    @property
    def log(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self._log.read_bytes().splitlines()] if self._log.exists() else []

    def check_exact(self, caller: Caller) -> dict[str, list[int]]:
        """Every turn is what the engine was given and gave, behind its parent's row. Returns the rows."""
        logged = {line["request_id"]: line for line in self.log}
        rows: dict[str, list[int]] = {}
        for turn in caller.turns:
            line = logged[turn.turn_id]
            before = rows[turn.parent_turn_id] if turn.parent_turn_id else []
            assert before + turn.context_ids == line["prompt_token_ids"]
            assert turn.token_ids == line["token_ids"]
            assert turn.logprobs == line["logprobs"]
            assert turn.prompt_length == len(line["prompt_token_ids"])
            assert len(turn.token_ids) == len(turn.logprobs) == len(turn.versions)
            assert (turn.parent_turn_id is None) == (turn.opened_by is not None)
            rows[turn.turn_id] = line["prompt_token_ids"] + turn.token_ids
        return rows


@pytest.fixture(scope="session")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return scripted_tokenizer(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def renderer(model_path: Path) -> ChatRenderer:
    return ChatRenderer(model_path)


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def _server():
    """One server for the whole folder: its application is whichever gateway a test has set up."""
    holder: dict[str, Any] = {}

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await holder["bench"].gateway.asgi(scope, receive, send)

    server = HttpServer(app, bind("127.0.0.1", 0, token=""))
    await server.start()
    openai_client = openai.AsyncOpenAI(
        base_url=server.url, api_key="none", max_retries=0, _strict_response_validation=True
    )
    anthropic_client = anthropic.AsyncAnthropic(
        base_url=server.url, api_key="none", max_retries=0, _strict_response_validation=True
    )
    async with openai_client, anthropic_client, httpx.AsyncClient(timeout=30) as http:
        yield server.url, holder, (openai_client, anthropic_client, http)
    await server.stop(grace_s=1)


@pytest.fixture
def bench(_server: Any, model_path: Path, renderer: ChatRenderer, tmp_path: Path) -> Bench:
    url, holder, clients = _server
    bench = Bench(url, clients, model_path, renderer, tmp_path)
    holder["bench"] = bench
    return bench


@pytest.fixture
def with_template(model_path, tmp_path):
    """A renderer of the scripted tokenizer with another template."""

    def make(template, **settings):
        folder = tmp_path / "model"
        shutil.copytree(model_path, folder)
        config = json.loads((folder / "tokenizer_config.json").read_text())
        config |= {"chat_template": template, **settings}
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
        return ChatRenderer(folder)

    return make


def _recording(caller: Caller) -> bytes:
    """Everything that a recording is made from."""
    return msgspec.json.encode([caller.turns, dict(caller.session.counters)])


@pytest_asyncio.fixture(loop_scope="session")
async def unmoved(bench: Bench):
    """A session with a turn, to be sent bad input: neither its recording nor that of another may change."""
    target, other = bench.open(), bench.open()
    for caller in (target, other):
        await caller.openai.chat.completions.create(model="m", messages=[{"role": "user", "content": "hi"}])
    before = [_recording(target), _recording(other)]
    yield target
    assert [_recording(target), _recording(other)] == before
    assert len(bench.log) == 2
    await other.openai.chat.completions.create(model="m", messages=[{"role": "user", "content": "hi"}])


async def until(condition: Any) -> None:
    """Let the event loop run until `condition` holds; the test's own time limit ends a wait that never does."""
    while not condition():  # noqa: ASYNC110 - what is waited for has no event
        await asyncio.sleep(0.001)
