"""The server of a simulated run: that of `molt-train server`, with another engine, another actor and another clock.

Everything else, from the socket to the ledger and the training loop, is put together by `molt.train.launch.training`.
"""

import contextlib
import os
import random
import sys
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

# What takes long to load, once for all servers that are forked from the process that has it.
import matplotlib.figure  # noqa: F401
import msgspec
import numpy as np

import molt.train.cluster.payloads
from integration_tests.simulation.clock import Clock
from integration_tests.simulation.evidence import TrainedRow, TrainedWindow
from integration_tests.simulation.parent import end_with_parent
from molt.train.actor.memory_plan import ModelShape
from molt.train.config import Config
from molt.train.controller.learning import Learning  # noqa: F401
from molt.train.engine.fake import ScriptedEngine, ScriptLine
from molt.train.experience import LocalPayloadStore
from molt.train.launch import training
from molt.train.records.experience import Payload
from molt.train.records.refit import RefitReport
from molt.train.records.window import StepReport, TrainWindow

_WORDS = ("one", "two", "three", "then", "next", "step", "answer", "seven", "the", "it", "goes", "on", "nothing", "42")


def serve(config: Config, folder: Path, life: int) -> None:
    """Train as `config` says until the run is over, then exit with 0. `life` counts the servers of the run."""
    end_with_parent()
    output = os.open(folder / "server.out", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for descriptor in (1, 2):
        os.dup2(output, descriptor)
    Clock(folder / "clock").install()
    engine = SimulatedEngine(config, folder / f"engine-{life}.jsonl", seed=f"{config.run.seed}/{life}")
    store = WatchedStore()
    actor = SimulatedActor(engine, store, folder / "trained.jsonl")
    replace(training, "ray", lambda *args, **kwargs: contextlib.nullcontext())
    replace(training, "make_actor", lambda *args, **kwargs: actor)
    replace(training, "make_fleet", lambda *args, **kwargs: SimulatedFleet(engine))
    replace(training, "MemoryReport", NoMemory)
    replace(molt.train.cluster.payloads, "RayPayloadStore", lambda: store)
    training.run_training(config, local_workers=False)
    sys.stdout.flush()
    os._exit(0)


def replace(module: Any, name: str, value: Callable[..., Any] | type) -> None:
    """Put a stand-in in the place of a part, which must be there."""
    assert hasattr(module, name), f"{module.__name__} has no {name} any more"
    setattr(module, name, value)


class SimulatedEngine(ScriptedEngine):
    """Says something new in every call, as the version that a refit gave it last; at times it is too busy."""

    def __init__(self, config: Config, log: Path, *, seed: str) -> None:
        super().__init__([], config.model.path, max_model_len=config.engine.max_model_len, log_path=log)
        self.version = 0
        self._rng = random.Random(f"{seed}/engine")
        self._num_calls = 0

    def _next_line(self, prompt_token_ids: Sequence[int]) -> ScriptLine:
        del prompt_token_ids
        rng = self._rng
        self._num_calls += 1
        if rng.random() < 0.01:
            return ScriptLine(error="overloaded")
        words = rng.choices(_WORDS, k=rng.randint(3, 30))
        return ScriptLine(
            text=" ".join([*words, str(self._num_calls)]),
            version=self.version,
            delay_s=rng.choice((0.0, 0.0, 0.02, 0.1)),
            finish_reason="length" if rng.random() < 0.05 else "stop",
            logprob=-rng.random(),
        )


class SimulatedFleet:
    """One engine, which never dies."""

    def __init__(self, engine: SimulatedEngine) -> None:
        self.engines = [engine]
        self.actors = ["engine"]

    async def start(self) -> None:
        pass

    async def fault(self, index: int) -> str | None:
        return None

    def kill(self) -> None:
        pass


class SimulatedActor:
    """Trains nothing, and writes down what it was given to train. A refit only says which version that made."""

    def __init__(self, engine: SimulatedEngine, store: "WatchedStore", log: Path) -> None:
        self._engine, self._store, self._log = engine, store, log
        self._version = 0

    async def start(self) -> dict[str, ModelShape]:
        fields = dict.fromkeys(ModelShape.__dataclass_fields__, 1)
        return {"policy": ModelShape(**fields)}

    async def train(self, windows: Sequence[TrainWindow], *, kl_coef: float) -> StepReport:
        del kl_coef
        step = windows[0].step
        rows = [self._row(row) for window in windows for rank in window.ranks for part in rank for row in part.rows]
        line = TrainedWindow(
            step=step, policy_version=windows[0].policy_version, rows=rows, num_payloads=len(self._store)
        )
        # A line of its own, whatever a server that was killed has left at the end.
        with self._log.open("ab") as log:
            log.write(b"\n" + msgspec.json.encode(line) + b"\n")
        self._version = step
        return StepReport(
            step=step, loss=0.0, grad_norm=0.0, lr=0.0, logprob_gap_mean=0.0, logprob_gap_max=0.0, metrics={}
        )

    async def save(self, folder: Path, *, step: int, progress: dict[str, Any]) -> None:
        folder.mkdir(parents=True)  # noqa: ASYNC240 - one small file
        (folder / "state.json").write_bytes(msgspec.json.encode([step, progress]))

    async def load(self, folder: Path) -> tuple[int, dict[str, Any]]:
        self._version, progress = msgspec.json.decode((folder / "state.json").read_bytes())
        return self._version, progress

    async def connect(self, engines: list[Any], *, workers_per_engine: int) -> None:
        pass

    async def refit(self, at_least: int) -> RefitReport:
        del at_least
        self._engine.version = self._version
        return RefitReport(version=self._version)

    async def check_health(self) -> None:
        pass

    def kill(self) -> None:
        pass

    def _row(self, row: Any) -> TrainedRow:
        payload = row.experience.reload(self._store)
        return TrainedRow(
            segment_id=row.experience.segment_id,
            token_ids=payload.token_ids[payload.action_mask].tolist(),
            logprobs=payload.logprobs[payload.action_mask].tolist(),
            versions=payload.versions[payload.action_mask].tolist(),
        )


class WatchedStore(LocalPayloadStore):
    """Knows how many payloads are still referred to."""

    def __init__(self) -> None:
        self._alive = weakref.WeakValueDictionary[int, np.ndarray]()
        self._num_put = 0

    def __len__(self) -> int:
        return len(self._alive)

    def put(self, payload: Payload) -> Payload:
        self._num_put += 1
        self._alive[self._num_put] = payload.token_ids
        return super().put(payload)


class NoMemory:
    """Instead of the comparison of planned and used memory."""

    def __init__(self, *args: object) -> None:
        pass

    async def after_window(self) -> None:
        pass
