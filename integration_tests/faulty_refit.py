"""An engine whose half of a refit can be made to fail, and an actor whose half can. What crosses is the real thing."""

import asyncio
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import torch
from transformers import AutoModelForCausalLM

from molt.train.cluster.engines import RayEngine
from molt.train.cluster.runtime import node_address
from molt.train.cluster.weight_sync import TRANSFER_TIMEOUT_S, RayWeightSync
from molt.train.engine.vllm import VllmEngine
from molt.train.errors import ActorError
from molt.train.records.refit import RefitReport
from molt.train.refit.receivers import WorkerExtension
from molt.train.refit.sender import make_refitter

NOISE = 0.03
"""Relative size of what an update changes in the weights: enough to move every log-prob."""


class FaultyWorker(WorkerExtension):
    """vLLM's worker extension, with faults."""

    def arm(self, fault):
        """The next update fails in this worker: in `load`, in `finish`, or by skipping a weight of a layer."""
        receiver = self.weight_transfer_engine
        load, finish = receiver.model.load_weights, receiver.finish_weight_update

        def failing(weights):
            for number, weight in enumerate(weights):
                if number == 10:
                    raise RuntimeError("injected: load")
                load([weight])

        def skipping(weights):
            load(weight for weight in weights if "layers.1.self_attn.k_proj" not in weight[0])

        def half_finished():
            finish()
            raise RuntimeError("injected: finish")

        if fault == "load":
            receiver.model.load_weights = failing
        elif fault == "skip":
            receiver.model.load_weights = skipping
        else:
            receiver.finish_weight_update = half_finished


class FaultyEngine(VllmEngine):
    """An engine's actor, with faults."""

    worker_extension = "integration_tests.faulty_refit.FaultyWorker"

    async def arm(self, fault: str) -> None:
        if fault == "resume":

            async def resume():
                raise RuntimeError("injected: resume")

            self._llm.resume_generation = resume
        else:
            await self._llm.collective_rpc("arm", args=(fault,))

    async def configure(self, settings: dict[str, Any]) -> None:
        self._settings = msgspec.structs.replace(self._settings, **settings)


class FaultyRayEngine(RayEngine):
    body = FaultyEngine


class FaultyClient:
    """The control plane of the engines; `fault` names the call that fails, before or after it was made."""

    def __init__(self, client: RayWeightSync):
        self._client, self.fault = client, ""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if self.fault == f"before {name}":
                raise RuntimeError(f"injected: before {name}")
            answer = getattr(self._client, name)(*args, **kwargs)
            if self.fault == f"after {name}":
                raise RuntimeError(f"injected: after {name}")
            return answer

        return call


class Actor:
    """One rank with the real sender. Every version's weights can be asked for later."""

    def __init__(self, folder: Path):
        self._folder, self._base = folder, AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self.model = self._load()
        self.version = 0
        self.fault = ""
        self.on_weight: dict[int, Callable[[], None]] = {}
        """Called before the weight of that number is sent."""

    def _load(self) -> Any:
        return AutoModelForCausalLM.from_pretrained(self._folder, dtype=torch.float32).eval()

    def at(self, version: int) -> Any:
        """The model of a version."""
        model = self._load()
        self._set(model, version)
        return model

    def learn(self) -> int:
        """One update; returns its version."""
        self.version += 1
        self._set(self.model, self.version)
        return self.version

    def _set(self, model: Any, version: int) -> None:
        generator = torch.Generator().manual_seed(version)
        with torch.no_grad():
            for weight, base in zip(model.parameters(), self._base.parameters(), strict=True):
                noise = torch.randn(base.shape, generator=generator) * base.std(correction=0)
                weight.copy_(base + NOISE * noise if version else base)

    async def connect(self, engines: list[Any], *, workers_per_engine: int) -> None:
        host, port = node_address()
        init = {"host": host, "port": port, "world_size": 1 + len(engines), "timeout_s": TRANSFER_TIMEOUT_S}
        self._client = FaultyClient(RayWeightSync(engines, workers_per_engine=workers_per_engine, timeout_s=120.0))
        self._refitter = await self._ask(
            make_refitter, self.model, "gloo", rank=0, init=init, client=self._client, verify="sample"
        )
        gather = self._refitter._weights._gather

        def faulty():
            for number, (name, weight) in enumerate(gather()):
                if number in self.on_weight:
                    self.on_weight.pop(number)()
                # Digests are of what was gathered: what crosses is something else.
                yield name, (weight + 1e-3 if self.fault == "corrupt" and number == 7 else weight)

        self._refitter._weights._gather = faulty

    async def refit(self, at_least: int) -> RefitReport:
        if self.version < at_least:
            return RefitReport(version=self.version, sent=False)
        self._client.fault = self.fault
        try:
            return RefitReport(version=self.version, interrupted=await self._ask(self._refitter.refit, self.version))
        finally:
            self.fault = ""

    @staticmethod
    async def _ask(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        try:
            return await asyncio.to_thread(function, *args, **kwargs)
        except Exception as error:
            raise ActorError(f"{type(error).__name__}: {error}") from error


def raising(message: str) -> Callable[[], None]:
    """What raises `message` when it is called."""

    def call() -> None:
        raise RuntimeError(message)

    return call


def killing(pid: int) -> Callable[[], None]:
    """What kills a process when it is called."""
    return lambda: os.kill(pid, signal.SIGKILL)
