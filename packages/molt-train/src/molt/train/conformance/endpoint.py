"""A gateway on the scripted engine, in a process of its own, as anybody would start it."""

import http.client
import secrets
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from molt.agents.protocol import API_PREFIX, SessionReply
from molt.train.errors import MoltError
from molt.train.records.recording import Recording

START_S, STOP_S = 90.0, 30.0
MAX_MODEL_LEN = 200_000
"""Tokens of the context window: the tools of coding agents alone are some ten thousand words."""


class EngineCall(msgspec.Struct, kw_only=True):
    """A line of the engine's log."""

    request_id: str
    prompt_token_ids: list[int]
    token_ids: list[int]
    logprobs: list[float]


@dataclass(frozen=True)
class Endpoint:
    """A running gateway and its control API."""

    url: str
    token: str
    log: Path

    def open_session(self) -> SessionReply:
        """A new session, sampled as in training: as the run says, whatever the client asks for."""
        body = b'{"sampling_policy": "enforce"}'
        return msgspec.json.decode(self._request("POST", "/sessions", body), type=SessionReply)

    def recording(self, session_id: str) -> Recording:
        """What the session recorded so far."""
        return msgspec.json.decode(self._request("GET", f"/sessions/{session_id}"), type=Recording)

    def engine_calls(self) -> dict[str, EngineCall]:
        """What the engine was given and gave, by request."""
        lines = self.log.read_bytes().splitlines() if self.log.exists() else []
        calls = [msgspec.json.decode(line, type=EngineCall) for line in lines]
        return {call.request_id: call for call in calls}

    def _request(self, method: str, path: str, body: bytes | None = None) -> bytes:
        at = urlsplit(self.url)
        connection = http.client.HTTPConnection(at.hostname or "", at.port, timeout=60)
        try:
            connection.request(method, API_PREFIX + path, body, {"authorization": f"Bearer {self.token}"})
            reply = connection.getresponse()
            content = reply.read()
        finally:
            connection.close()
        if reply.status >= 300:
            raise MoltError(f"the gateway answered {method} {path} with {reply.status}: {content[:500]!r}")
        return content


@contextmanager
def scripted_gateway(folder: Path, script: bytes) -> Iterator[Endpoint]:
    """Serve `script` (JSONL) until the block ends. `folder` is for its files. Raises MoltError when it cannot start."""
    (folder / "script.jsonl").write_bytes(script)
    token, log = secrets.token_hex(24), folder / "engine.jsonl"
    command = [sys.executable, "-m", "molt.train.cli", "gateway", "--engine", "scripted", "--token", token]
    command += ["--script", str(folder / "script.jsonl"), "--engine-log", str(log)]
    command += [f"engine.max_model_len={MAX_MODEL_LEN}", f"run.dir={folder / 'run'}"]
    with (folder / "stderr").open("w") as stderr:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=stderr, text=True)
    try:
        yield Endpoint(_url_of(process, folder / "stderr"), token, log)
    finally:
        process.terminate()
        try:
            process.communicate(timeout=STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()


def _url_of(process: "subprocess.Popen[str]", stderr: Path) -> str:
    assert process.stdout is not None
    limit = threading.Timer(START_S, process.kill)
    limit.start()
    line = process.stdout.readline()
    limit.cancel()
    if not line:
        process.wait()
        raise MoltError(f"the gateway did not start: {stderr.read_text()[-2000:]}")
    return msgspec.json.decode(line, type=dict[str, str])["url"]
