"""Which engine serves a request: sessions stick to one for its prefix cache, and leave it when it is gone."""

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator

from molt.train.engine.protocol import Engine, EngineChunk, EngineRequest
from molt.train.errors import EngineDeadError

MAX_PLACES = 65536


class Router:
    """`engine.protocol.Engine` over several. Requests wait while the router is held, and while no engine is up."""

    def __init__(self) -> None:
        self._engines: dict[int, Engine] = {}
        self._load: dict[int, int] = {}
        self._places: OrderedDict[str, int] = OrderedDict()
        self._request_engine: dict[str, int] = {}
        self._available = asyncio.Event()

    def admit(self, index: int, engine: Engine) -> None:
        """Serve requests from `engine`, under the number `index`."""
        self._engines[index] = engine
        self._load[index] = 0
        self._available.set()

    def remove(self, index: int) -> None:
        """Send no more requests to an engine. Unknown numbers are ignored."""
        self._engines.pop(index, None)
        self._load.pop(index, None)
        if not self._engines:
            self._available.clear()

    @property
    def num_running(self) -> int:
        """Requests that engines are working on."""
        return sum(self._load.values())

    async def generate(self, request: EngineRequest) -> EngineChunk:
        """The whole generation; raises EngineDeadError when its engine died, after taking that engine out."""
        index, engine = await self._take(request)
        try:
            return await engine.generate(request)
        except EngineDeadError:
            self.remove(index)
            raise
        finally:
            self._give_back(index, request.request_id)

    async def stream(self, request: EngineRequest) -> AsyncIterator[EngineChunk]:
        """The generation as it is sampled; raises EngineDeadError as `generate` does."""
        index, engine = await self._take(request)
        try:
            async for chunk in engine.stream(request):
                yield chunk
        except EngineDeadError:
            self.remove(index)
            raise
        finally:
            self._give_back(index, request.request_id)

    async def abort(self, request_id: str) -> None:
        """Stop a generation, wherever it runs."""
        engine = self._engines.get(self._request_engine.get(request_id, -1))
        if engine is not None:
            await engine.abort(request_id)

    async def _take(self, request: EngineRequest) -> tuple[int, Engine]:
        while not self._engines:
            await self._available.wait()  # bounded by the gateway's hold_s
        place = self._places.get(request.affinity)
        if place not in self._engines:
            place = min(self._engines, key=lambda i: self._load[i])
        if request.affinity:
            self._places[request.affinity] = place
            self._places.move_to_end(request.affinity)
            if len(self._places) > MAX_PLACES:
                self._places.popitem(last=False)
        self._load[place] += 1
        self._request_engine[request.request_id] = place
        return place, self._engines[place]

    def _give_back(self, index: int, request_id: str) -> None:
        self._request_engine.pop(request_id, None)
        if index in self._load:
            self._load[index] -= 1
