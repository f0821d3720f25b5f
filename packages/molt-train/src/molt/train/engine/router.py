"""Which engine serves a request: sessions stick to one for its prefix cache, and leave it when it is gone."""

from collections import OrderedDict
from collections.abc import AsyncIterator
from dataclasses import dataclass

from molt.train.engine.protocol import Engine, EngineChunk, EngineRequest
from molt.train.errors import EngineDeadError

MAX_PLACES = 65536


@dataclass
class _Seat:
    """An engine that takes requests, and how many it is working on."""

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

    def admit(self, index: int, engine: Engine) -> None:
        """Serve requests from `engine`, under the number `index`."""
        self._seats[index] = _Seat(engine)

    def remove(self, index: int) -> None:
        """Send no more requests to an engine. Unknown numbers are ignored."""
        self._seats.pop(index, None)

    @property
    def num_running(self) -> int:
        """Requests that engines are working on."""
        return len(self._running)

    async def generate(self, request: EngineRequest) -> EngineChunk:
        """The whole generation; raises EngineDeadError when its engine died, after taking that engine out."""
        index, seat = self._take(request)
        try:
            return await seat.engine.generate(request)
        except EngineDeadError:
            self._take_out(index, seat)
            raise
        finally:
            self._give_back(seat, request.request_id)

    async def stream(self, request: EngineRequest) -> AsyncIterator[EngineChunk]:
        """The generation as it is sampled; raises EngineDeadError as `generate` does."""
        index, seat = self._take(request)
        try:
            async for chunk in seat.engine.stream(request):
                yield chunk
        except EngineDeadError:
            self._take_out(index, seat)
            raise
        finally:
            self._give_back(seat, request.request_id)

    async def abort(self, request_id: str) -> None:
        """Stop a generation, wherever it runs."""
        seat = self._running.get(request_id)
        if seat is not None:
            await seat.engine.abort(request_id)

    def _take(self, request: EngineRequest) -> tuple[int, _Seat]:
        if not self._seats:
            # Waiting is the gateway's affair: it knows for how long, and whether the client is still there.
            raise EngineDeadError(f"request {request.request_id}: no engine is up")
        session = request.affinity[-1] if request.affinity else ""
        place = self._places.get(session)
        if place not in self._seats:
            place = min(self._seats, key=lambda index: self._seats[index].load)
        if session:
            self._places[session] = place
            self._places.move_to_end(session)
            if len(self._places) > MAX_PLACES:
                self._places.popitem(last=False)
        seat = self._seats[place]
        seat.load += 1
        self._running[request.request_id] = seat
        return place, seat

    def _take_out(self, index: int, seat: _Seat) -> None:
        if self._seats.get(index) is seat:  # a restarted engine may have the number by now
            self.remove(index)

    def _give_back(self, seat: _Seat, request_id: str) -> None:
        seat.load -= 1
        self.num_finished += 1
        self._running.pop(request_id, None)
