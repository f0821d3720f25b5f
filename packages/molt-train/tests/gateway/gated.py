"""An engine that samples when a test says so."""

import asyncio

from molt.train.engine.protocol import EngineChunk


class GatedEngine:
    """Samples the next chunk when the test says so."""

    def __init__(self, *chunks):
        self._chunks = list(chunks)
        self.gate = asyncio.Semaphore(0)
        self.running, self.aborted = set(), []
        self.peak = 0

    def sample(self, num_chunks):
        for _ in range(num_chunks):
            self.gate.release()

    async def stream(self, request):
        self.running.add(request.request_id)
        self.peak = max(self.peak, len(self.running))
        try:
            for number, chunk in enumerate(self._chunks):
                await self.gate.acquire()
                if request.request_id in self.aborted:
                    yield EngineChunk(token_ids=[], logprobs=[], versions=[], finish_reason="abort")
                    return
                if isinstance(chunk, Exception):
                    raise chunk
                last = number == len(self._chunks) - 1
                yield EngineChunk(
                    token_ids=chunk,
                    logprobs=[-1.0] * len(chunk),
                    versions=[7] * len(chunk),
                    finish_reason="stop" if last else None,
                )
        finally:
            self.running.discard(request.request_id)

    async def generate(self, request):
        chunks = [chunk async for chunk in self.stream(request)]
        token_ids = [token_id for chunk in chunks for token_id in chunk.token_ids]
        return EngineChunk(
            token_ids=token_ids,
            logprobs=[-1.0] * len(token_ids),
            versions=[7] * len(token_ids),
            finish_reason=chunks[-1].finish_reason,
        )

    async def abort(self, request_id):
        self.aborted.append(request_id)
        self.gate.release()


def gated(bench, *chunks, **settings):
    engine = GatedEngine(*[bench.encode(c) if isinstance(c, str) else c for c in chunks])
    bench.serve(engine=engine, **settings)
    return engine
