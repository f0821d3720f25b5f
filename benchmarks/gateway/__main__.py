"""What capture costs: the gateway against a bare ASGI application on the same server: `python -m benchmarks.gateway`.

Both serve on one core, the load comes from the other one. The gateway runs the scripted engine without delays, exact
capture and the durable record on; a single turn has a prompt of about 200 tokens and a reply of 50, each in a session
of its own, eight to a prompt. The bare application returns the bytes of such a reply. The two are measured in turn,
round by round, so that what else the machine does falls on both. One JSON line; times are in milliseconds, memory in
bytes.
"""

import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import uvloop

from benchmarks.gateway.load import Timings, drive, request
from molt.train.engine.scripted_tokenizer import scripted_tokenizer
from molt.train.gateway.render import ChatRenderer

TOKEN = "benchmark-token-0123456789"
NUM_PROMPT, NUM_REPLY = 200, 50
GROUP = 8
"""Rollouts of one prompt."""
NUM_ROUNDS = 9
NUM_CALLS = {1: 200, 16: 1600, 64: 1600}
"""Of a round, by concurrency."""
NUM_STREAMS, NUM_TURNS = 128, 100
NUM_BARE = {False: 8, True: 2}
"""Calls of the bare application for each of the gateway, whole and streamed: a round of either takes about as long."""
Rounds = tuple[list[Timings], list[Timings]]
"""Of the gateway, and of the bare application."""
MARK = b'"content":" '
"""In the first event that shows sampled text, and in none before."""


def main() -> None:
    """Measure, and print the comparison."""
    with tempfile.TemporaryDirectory() as scratch:
        print(json.dumps(uvloop.run(measure(Path(scratch)))))


async def measure(folder: Path) -> dict[str, Any]:
    """Every figure."""
    if (cores := sorted(os.sched_getaffinity(0)))[1:]:
        os.sched_setaffinity(0, cores[1:2])
    renderer = ChatRenderer(scripted_tokenizer(folder / "tokenizer"))
    reply = renderer.decode(renderer.encode(" the reply is" * NUM_REPLY)[: NUM_REPLY - 1])
    script = folder / "script.jsonl"
    script.write_text(json.dumps({"text": reply}) + "\n", encoding="utf-8")
    command = ["-m", "molt.train.cli", "gateway", "--engine", "scripted", "--script", str(script)]
    prompts = Prompts(renderer)
    with serving([*command, "--port", "0", "--token", TOKEN], cores[0]) as gateway:
        (folder / "reply.json").write_text(json.dumps(await capture(gateway, prompts)), encoding="utf-8")
        with serving(["-m", "benchmarks.gateway.floor", str(folder / "reply.json")], cores[0]) as floor:
            rounds = await load(gateway, floor, prompts)
        figures: dict[str, Any] = {"memory_a_token": await memory(gateway, prompts)}
        figures["turn_100_over_turn_1"] = await long_session(gateway)
    medians = [{kind: summary(timings[i]) for kind, timings in rounds.items()} for i in (0, 1)]
    return {"benchmark": "gateway", **compare(rounds), **figures, "gateway": medians[0], "bare": medians[1]}


def compare(rounds: dict[str, Rounds]) -> dict[str, float]:
    """The figures that are promised; of two servers, the median over rounds in which both were measured."""

    def over_rounds(kind: str, figure: Callable[[Timings, Timings], float]) -> float:
        return round(statistics.median(map(figure, *rounds[kind])), 3)

    return {
        "rate_16": over_rounds("16", lambda gateway, bare: gateway.rate / bare.rate),
        "p95_over_median_64": over_rounds("64", lambda gateway, _: p95(gateway) / statistics.median(gateway.whole)),
        "added_median_1": over_rounds("1", lambda gateway, bare: 1e3 * (median(gateway) - median(bare))),
        "streamed_tokens": over_rounds("stream", lambda gateway, bare: gateway.rate / bare.rate),
        "added_first_token": over_rounds("stream_1", lambda gateway, bare: 1e3 * (first(gateway) - first(bare))),
    }


def median(timings: Timings) -> float:
    """Of the whole replies, in seconds."""
    return statistics.median(timings.whole)


def p95(timings: Timings) -> float:
    """95th percentile of the whole replies, in seconds."""
    return statistics.quantiles(timings.whole, n=20)[-1]


def first(timings: Timings) -> float:
    """Median of the first events of content, in seconds."""
    return statistics.median(timings.first)


class Server:
    """A server process under load."""

    def __init__(self, url: str, pid: int) -> None:
        self.url, self.pid = url, pid
        self.port = int(url.rpartition(":")[2])
        self.is_gateway = False

    def resident(self) -> int:
        """Bytes in memory."""
        pages = Path(f"/proc/{self.pid}/statm").read_text(encoding="ascii").split()[1]
        return int(pages) * os.sysconf("SC_PAGE_SIZE")


@contextlib.contextmanager
def serving(arguments: list[str], core: int) -> Iterator[Server]:
    """A server in a process of its own, on one core."""
    process = subprocess.Popen([sys.executable, *arguments], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout
        os.sched_setaffinity(process.pid, {core})
        server = Server(json.loads(process.stdout.readline())["url"], process.pid)
        server.is_gateway = "gateway" in arguments
        yield server
    finally:
        process.terminate()
        process.wait()


class Prompts:
    """Prompts of one length. Each serves a group of rollouts, as it does in training."""

    def __init__(self, renderer: ChatRenderer) -> None:
        self._num_used = 0
        per_word = renderer.encode(" word word word word word")
        self._words = (NUM_PROMPT - 30) * 5 // len(per_word)

    def body(self, *, stream: bool) -> bytes:
        """The JSON of a call."""
        self._num_used += 1
        text = f"Task {self._num_used // GROUP}:" + " word" * self._words
        fields = {"model": "policy", "messages": [{"role": "user", "content": text}], "max_tokens": 2 * NUM_REPLY}
        return json.dumps(fields | ({"stream": True} if stream else {}), separators=(",", ":")).encode()


async def open_sessions(server: Server, count: int) -> list[dict[str, str]]:
    """Sessions of the gateway."""
    async with httpx.AsyncClient(base_url=server.url, headers={"authorization": f"Bearer {TOKEN}"}) as http:
        return [(await http.post("/api/v1/sessions")).raise_for_status().json() for _ in range(count)]


async def calls(server: Server, prompts: Prompts, count: int, *, stream: bool = False) -> list[bytes]:
    """Requests, each in a session of its own, which stays open."""
    if not server.is_gateway:
        return [request("/s/x/v1/chat/completions", prompts.body(stream=stream)) for _ in range(count)]
    sessions = await open_sessions(server, count)
    path = "/s/{session_id}/v1/chat/completions"
    return [request(path.format(**s), prompts.body(stream=stream), s["api_key"]) for s in sessions]


async def load(gateway: Server, bare: Server, prompts: Prompts) -> dict[str, Rounds]:
    """Whole and streamed replies at several levels of concurrency, of both servers in turn, `NUM_ROUNDS` times."""
    kinds = {str(concurrency): (concurrency, count, False) for concurrency, count in NUM_CALLS.items()}
    kinds |= {"stream_1": (1, NUM_STREAMS, True), "stream": (16, NUM_STREAMS, True)}
    rounds: dict[str, Rounds] = {}
    for server in (gateway, bare):
        await drive(server.port, await calls(server, prompts, 400), concurrency=16)  # warm-up
    for kind, (concurrency, count, stream) in kinds.items():
        rounds[kind] = ([], [])
        for _ in range(NUM_ROUNDS):
            for server, timings in zip((gateway, bare), rounds[kind], strict=True):
                number = count if server.is_gateway else count * NUM_BARE[stream]
                requests = await calls(server, prompts, number, stream=stream)
                marks = MARK if stream else b""
                timings.append(await drive(server.port, requests, concurrency=concurrency, marks=marks))
    return rounds


def summary(rounds: list[Timings]) -> dict[str, float]:
    """Medians over the rounds: requests a second, and milliseconds."""
    return {
        "rate": round(statistics.median(timings.rate for timings in rounds), 1),
        "median": round(1e3 * statistics.median(map(median, rounds)), 3),
        "p95": round(1e3 * statistics.median(map(p95, rounds)), 3),
        "first": round(1e3 * statistics.median(map(first, rounds)), 3),
    }


async def memory(server: Server, prompts: Prompts, count: int = 3000) -> float:
    """Bytes that the server keeps for each recorded token, beyond the bodies of the requests."""
    requests = await calls(server, prompts, count)
    before = server.resident()
    await drive(server.port, requests, concurrency=16)
    grown = server.resident() - before - sum(map(len, requests))
    return round(grown / (count * (NUM_PROMPT + NUM_REPLY)), 1)


async def long_session(server: Server) -> dict[str, float]:
    """A conversation of many turns: time of its last ten over that of its first ten, in milliseconds."""
    first, last = [], []
    for session in await open_sessions(server, 10):
        messages: list[dict[str, str]] = []
        times = []
        for turn in range(NUM_TURNS):
            messages.append({"role": "user", "content": f"Turn {turn} of {session['session_id']}:" + " word" * 40})
            body = json.dumps({"model": "policy", "messages": messages, "max_tokens": 100}).encode()
            path = f"/s/{session['session_id']}/v1/chat/completions"
            timings = await drive(server.port, [request(path, body, session["api_key"])], concurrency=1)
            times.append(timings.whole[0])
            messages.append({"role": "assistant", "content": _reply_text(timings)})
        first += times[1:11]
        last += times[-10:]
    before, after = statistics.median(first), statistics.median(last)
    return {"first": round(1e3 * before, 3), "last": round(1e3 * after, 3), "ratio": round(after / before, 2)}


def _reply_text(timings: Timings) -> str:
    return json.loads(timings.last_body)["choices"][0]["message"]["content"]


async def capture(server: Server, prompts: Prompts) -> dict[str, Any]:
    """A reply of the gateway, whole and as events, for the bare application to return."""
    async with httpx.AsyncClient(base_url=server.url) as http:
        bodies = []
        for session, stream in zip(await open_sessions(server, 2), (False, True), strict=True):
            url = f"/s/{session['session_id']}/v1/chat/completions"
            headers = {"authorization": f"Bearer {session['api_key']}"}
            reply = await http.post(url, content=prompts.body(stream=stream), headers=headers)
            bodies.append(reply.raise_for_status().text)
    events = [event + "\n\n" for event in bodies[1].split("\n\n") if event]
    return {"whole": bodies[0], "events": events}


if __name__ == "__main__":
    main()
