"""Which engine serves a request.

A conversation stays with the engine that has its prefix in its cache: that of its branch if one has served it, else
that of its session, else the least loaded. It moves when the engine is gone or takes no more requests, and when it has
`MAX_LEAD` more requests than the least loaded: then waiting costs more than computing the prefix again.
"""

from collections import OrderedDict
from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from molt.train.engine.protocol import Engine, EngineChunk, EngineRequest
from molt.train.errors import EngineDeadError, EngineOverloadedError

MAX_PLACES = 65536
"""Branches and sessions whose engine is remembered."""
MAX_LEAD = 16
"""Requests by which a conversation's engine may be ahead of the least loaded before the conversation moves."""


@dataclass
class _Seat:
    """An engine that takes requests, and how many it is working on."""

    index: int
    engine: Engine
    load: int = 0


class Router:
    """`engine.protocol.Engine` over several. While none is up, every request fails with EngineDeadError."""

    def __init__(self) -> None:
        self._seats: dict[int, _Seat] = {}
        self._places: OrderedDict[str, int] = OrderedDict()
        self._running: dict[str, _Seat] = {}
        self.num_finished = 0
        """Generations that ended, well or not: what a stall guard watches."""
        self.num_moved = 0
        """Requests that went to another engine than the one with their prefix."""
        self.num_prompt_tokens = 0
        self.num_cached_tokens = 0
        """Of the prompt tokens of finished generations, those that the engine had in its prefix cache."""

    def admit(self, index: int, engine: Engine) -> None:
        """Serve requests from `engine`, under the number `index`."""
        self._seats[index] = _Seat(index, engine)

    def remove(self, index: int) -> None:
        """Send no more requests to an engine. Unknown numbers are ignored."""
        self._seats.pop(index, None)

    @property
    def num_running(self) -> int:
        """Requests that engines are working on."""
        return len(self._running)

    @property
    def loads(self) -> dict[int, int]:
        """Requests that each engine in service is working on, by its number."""
        return {number: seat.load for number, seat in self._seats.items()}

    @property
    def prefix_hit_rate(self) -> float:
        """Prompt tokens that engines had in their caches, over all prompt tokens; 0.0 before there are any."""
        return self.num_cached_tokens / self.num_prompt_tokens if self.num_prompt_tokens else 0.0

    async def generate(self, request: EngineRequest) -> EngineChunk:
        """The whole generation; raises EngineDeadError when its engine died, after taking that engine out.

        A request that its engine is too busy to take is tried once more, with another one.
        """
        busy: _Seat | None = None
        while True:
            seat = self._choose(request, busy)
            try:
                with self._working(seat, request.request_id):
                    chunk = await seat.engine.generate(request)
            except EngineOverloadedError:
                if not self._may_try_another(seat, busy):
                    raise
                busy = seat
            else:
                self._count(request, chunk)
                return chunk

    async def stream(self, request: EngineRequest) -> AsyncGenerator[EngineChunk]:
        """The generation as it is sampled; raises EngineDeadError, and tries once more, as `generate` does."""
        busy: _Seat | None = None
        begun = False
        while True:
            seat = self._choose(request, busy)
            try:
                with self._working(seat, request.request_id):
                    async for chunk in seat.engine.stream(request):
                        begun = True
                        if chunk.finish_reason is not None:
                            self._count(request, chunk)
                        yield chunk
            except EngineOverloadedError:
                if begun or not self._may_try_another(seat, busy):
                    raise
                busy = seat
            else:
                return

    async def abort(self, request_id: str) -> None:
        """Stop a generation, wherever it runs."""
        seat = self._running.get(request_id)
        if seat is not None:
            await seat.engine.abort(request_id)

    def _choose(self, request: EngineRequest, busy: _Seat | None) -> _Seat:
        """The engine for a request; not the `busy` one, which has refused it."""
        seats = [seat for seat in self._seats.values() if seat is not busy]
        if not seats:
            # Waiting is the gateway's affair: it knows for how long, and whether the client is still there.
            raise EngineDeadError(f"request {request.request_id}: no engine is up")
        least = min(seats, key=lambda seat: seat.load)
        places = [self._places.get(name) for name in request.affinity]
        home = next((self._seats[place] for place in places if place in self._seats), None)
        stays = home is not None and home is not busy and home.load - least.load < MAX_LEAD
        seat = home if home is not None and stays else least
        if home is not None and seat is not home:
            self.num_moved += 1
        for name, place in zip(request.affinity, places, strict=True):
            if name == request.affinity[0] or place not in self._seats:
                self._places[name] = seat.index
            self._places.move_to_end(name)
        while len(self._places) > MAX_PLACES:
            self._places.popitem(last=False)
        return seat

    def _may_try_another(self, seat: _Seat, busy: _Seat | None) -> bool:
        return busy is None and any(other is not seat for other in self._seats.values())

    @contextmanager
    def _working(self, seat: _Seat, request_id: str) -> Iterator[None]:
        seat.load += 1
        self._running[request_id] = seat
        try:
            yield
        except EngineDeadError:
            if self._seats.get(seat.index) is seat:  # a restarted engine may have the number by now
                self.remove(seat.index)
            raise
        finally:
            seat.load -= 1
            self.num_finished += 1
            self._running.pop(request_id, None)

    def _count(self, request: EngineRequest, last: EngineChunk) -> None:
        self.num_prompt_tokens += len(request.prompt_token_ids)
        self.num_cached_tokens += last.num_cached_tokens
