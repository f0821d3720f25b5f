"""Runs windows on the ranks of several world sizes, without Ray.

Importing AutoModel takes many seconds: one process does it, and forks the ranks off.
"""

import itertools
import os
import pickle
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec

from molt.train.actor.setup import RankSetup
from molt.train.experience import LocalPayloadStore
from molt.train.records.window import RankWindow, Scores, StepReport, TrainWindow

Windows = Sequence[TrainWindow]
"""The optimizer steps of one update."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """What the ranks of one world size do together."""

    kind: Literal["gradients", "learn"]
    """`gradients`: of each update alone, the weights staying as they are; `learn`: one update after another, a
    checkpoint before the last, and the last again after a resume."""
    setup: RankSetup
    updates: Sequence[Windows]


@dataclass(frozen=True, kw_only=True)
class Found:
    """What one rank found; tensors are whole, as arrays by the names of the weights."""

    reports: list[StepReport]
    gradients: list[dict[str, Any]]
    """Of the last optimizer step of each update."""
    weights: dict[str, Any]
    """At the end."""
    again: StepReport | None = None
    """The last update's, after the resume."""
    scores: Sequence[Sequence[Scores]] = ()
    """Before each update and at the end, of this rank's rows."""


def run_jobs(folder: Path, jobs: Mapping[int, Mapping[str, Job]], *, hash_seed: int) -> subprocess.Popen:
    """Start the jobs of each world size, by name. The process has an environment of its own, and `log` its output."""
    folder.mkdir(parents=True)
    (folder / "jobs").write_bytes(pickle.dumps(jobs))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": str(hash_seed)}
    with (folder / "log").open("w") as log:
        program = "import sys; from integration_tests.rank_process import main; main(sys.argv[1])"
        command = [sys.executable, "-c", program, str(folder)]
        return subprocess.Popen(command, stdout=log, stderr=log, env=environment, cwd=Path(__file__).parent.parent)


def found_by(folder: Path, *, world_size: int) -> list[dict[str, Found]]:
    """What the ranks found, in their order, by the names of the jobs."""
    return [pickle.loads((folder / f"found-{world_size}-{rank}").read_bytes()) for rank in range(world_size)]


def main(path: str) -> None:
    """Do the jobs in the folder `path`."""
    import torch.multiprocessing

    from molt.train.actor import rank  # the ranks are forked with it

    del rank
    folder = Path(path)
    jobs = pickle.loads((folder / "jobs").read_bytes())
    groups = [
        torch.multiprocessing.start_processes(
            run_rank,
            (folder, world_size, of_size),
            nprocs=world_size,
            join=False,
            daemon=True,
            start_method="fork",
        )
        for world_size, of_size in jobs.items()
    ]
    for group in groups:
        while not group.join():
            pass


def run_rank(rank: int, folder: Path, world_size: int, jobs: Mapping[str, Job]) -> None:
    """One rank's part of the jobs. Those that leave the weights alone and follow each other share a loaded policy."""
    import torch

    found: dict[str, Found] = {}
    of_policy = itertools.groupby(
        jobs.items(), lambda job: job[0] if job[1].kind == "learn" else job[1].setup.model_path
    )
    for number, (_, group) in enumerate(of_policy):
        named = list(group)
        worker = _Worker(msgspec.structs.replace(named[0][1].setup, rank=rank))
        worker.start(f"file://{folder}/meeting-{world_size}-{number}")
        for name, job in named:
            if job.kind == "learn":
                found[name] = worker.learn(job, folder / f"checkpoint-{world_size}-{number}")
            else:
                found[name] = worker.gradients(job)
        torch.distributed.destroy_process_group()
    (folder / f"found-{world_size}-{rank}").write_bytes(pickle.dumps(found))


class _Worker:
    """An ActorRank whose gradients and weights can be seen."""

    def __init__(self, setup: RankSetup):
        from molt.train.actor.rank import ActorRank

        self._rank, self._number = ActorRank(setup, LocalPayloadStore()), setup.rank

    def start(self, rendezvous: str) -> None:
        self._rank.start(rendezvous)

    def gradients(self, job: Job) -> Found:
        assert job.setup.actor.optimizer.lr == 0
        self._rank._setup = msgspec.structs.replace(job.setup, rank=self._number)
        reports, gradients = [], []
        for step, windows in enumerate(job.updates, 1):
            reports.append(self._update(windows, step)[0])
            gradients.append(self._whole(of_gradients=True))
        return Found(reports=reports, gradients=gradients, weights=self._whole())

    def learn(self, job: Job, checkpoint: Path) -> Found:
        reports, scores = [], []
        for step, windows in enumerate(job.updates, 1):
            if step == len(job.updates):
                self._rank.save(str(checkpoint), step=step - 1, progress={"kl_coef": 0.5})
            report, before = self._update(windows, step)
            reports.append(report)
            scores.append(before)
        assert self._rank.load(str(checkpoint)) == (step - 1, {"kl_coef": 0.5})
        again, _ = self._update(windows, step)
        scores.append([score for window in windows for score in self._rank.score(window.share(self._number))])
        return Found(reports=reports, gradients=[], weights=self._whole(), again=again, scores=scores)

    def _update(self, windows: Windows, step: int) -> tuple[StepReport, list[Scores]]:
        shares = [window.share(self._number) for window in windows]
        scores = [self._rank.score(share) for share in shares]
        scored = [with_scores(share, found) for share, found in zip(shares, scores, strict=True)]
        kl_coef = self._rank._setup.algorithm.kl_coef
        return self._rank.train(scored, step=step, kl_coef=kl_coef), list(itertools.chain(*scores))

    def _whole(self, *, of_gradients: bool = False) -> dict[str, Any]:
        from torch.distributed.tensor import DTensor

        whole = {}
        for name, parameter in self._rank._trainer.policy.model.named_parameters():
            tensor = parameter.grad if of_gradients else parameter.detach()
            whole[name] = (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).numpy().copy()
        return whole


def with_scores(share: RankWindow, scores: Sequence[Scores]) -> RankWindow:
    """The rows with what the ranks computed of them."""
    given = iter(scores)
    return msgspec.structs.replace(
        share,
        microbatches=tuple(
            msgspec.structs.replace(
                microbatch,
                rows=tuple(
                    msgspec.structs.replace(row, reference=score.reference, values=score.values)
                    for row, score in zip(microbatch.rows, itertools.islice(given, len(microbatch.rows)), strict=True)
                ),
            )
            for microbatch in share.microbatches
        ),
    )
