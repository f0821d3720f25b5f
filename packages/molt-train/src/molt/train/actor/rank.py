"""The processes of one rank: what their Ray actors can be asked to do. Every method is called on all ranks together."""

# Shapes: N action tokens of a microbatch.

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

from molt.train.actor import checkpoint
from molt.train.actor.batch import Batch, collate
from molt.train.actor.critic import Critic
from molt.train.actor.frozen import load_frozen
from molt.train.actor.head import action_logprobs
from molt.train.actor.memory import PeakMeter, shape_of
from molt.train.actor.memory_plan import ModelShape, Role
from molt.train.actor.model import Policy, load_policy
from molt.train.actor.offload import backend, offload_states
from molt.train.actor.optimizer import make_optimizer, make_schedule
from molt.train.actor.policy_update import report, update_policy
from molt.train.actor.setup import RankSetup
from molt.train.actor.step import Share, Trainer, optimise
from molt.train.actor.value_model import load_value_model
from molt.train.actor.warmup import observe_policy
from molt.train.config import OptimizerConfig
from molt.train.records.experience import Payload, PayloadStore
from molt.train.records.refit import RefitReport
from molt.train.records.window import Microbatch, RankWindow, Scores, StepReport
from molt.train.refit.sender import Refitter, SyncClient, Transfer, make_refitter

Pass = Callable[[Batch], torch.Tensor]
"""A forward pass without gradient: a microbatch -> a number for each of its action tokens, [N]."""


class _Rank(ABC):
    """What the ranks of the actor and those of a critic of its own have in common."""

    def __init__(self, setup: RankSetup, store: PayloadStore):
        self._setup, self._store = setup, store
        self._critic: Critic | None = None
        self._payloads: dict[str, Payload] = {}
        """Those fetched for the calls that come next, by segment."""
        self._passes: dict[str, Pass] = {}
        """By the field of `Scores` that each fills."""

    def start(self, rendezvous: str) -> dict[Role, ModelShape]:
        """Join the process group at `rendezvous` (`tcp://host:port`), and load. Returns the shape of what is loaded."""
        setup = self._setup
        torch.set_num_threads(1)  # ranks, engines and gateway share the cores; more threads spin against each other
        torch.manual_seed(setup.seed)
        torch.distributed.init_process_group(
            backend(setup.actor.offload, has_cuda=torch.cuda.is_available()),
            init_method=rendezvous,
            rank=setup.rank,
            world_size=setup.world_size,
            timeout=timedelta(seconds=setup.collective_timeout_s),
        )
        self._meter = PeakMeter()
        shapes: dict[Role, ModelShape] = {role: shape_of(policy.model) for role, policy in self._load().items()}
        torch.manual_seed(setup.seed + setup.rank)  # what is dropped out differs between ranks
        return shapes

    def peak_bytes(self) -> int:
        """The most memory that this rank has held."""
        return self._meter.peak_bytes()

    def reload(self, windows: Sequence[RankWindow]) -> None:
        """Fetch the payloads of `windows`, in place of those of other rows.

        A call of its own, since `score` and `train` begin with what all ranks do together: a rank that missed a payload
        there would leave the others waiting. Raises PayloadLostError.
        """
        held = self._payloads
        rows = [row.experience for window in windows for microbatch in window.microbatches for row in microbatch.rows]
        self._payloads = {row.segment_id: held.get(row.segment_id) or row.reload(self._store) for row in rows}

    def score(self, window: RankWindow) -> list[Scores]:
        """What the algorithm needs of each row of `window` before its advantages, microbatch by microbatch."""
        rows: list[Scores] = []
        for microbatch in window.microbatches:
            batch = self._collate(microbatch)
            rows += _by_row({name: forward(batch) for name, forward in self._passes.items()}, microbatch)
        return rows

    @abstractmethod
    def _load(self) -> Mapping[Role, Policy]:
        """Load the models, and settle what `score` computes with them."""

    def _load_critic(self) -> Policy:
        setup = self._setup
        model = load_value_model(setup.critic_path, setup.actor)
        trainer = self._make_trainer(model, setup.critic.optimizer, num_steps=setup.num_steps)
        self._critic = Critic(trainer, value_clip=setup.critic.value_clip)
        self._passes["values"] = self._critic.values
        return model

    def _make_trainer(self, policy: Policy, settings: OptimizerConfig, *, num_steps: int) -> Trainer:
        optimizer = make_optimizer(policy.model, settings)
        if self._setup.actor.offload == "optimizer":
            offload_states(optimizer)
        return Trainer(
            policy=policy,
            optimizer=optimizer,
            schedule=make_schedule(optimizer, settings, num_steps=num_steps),
            max_grad_norm=settings.max_grad_norm,
            temperature=self._setup.temperature,
            logprob_chunk=self._setup.actor.logprob_chunk,
        )

    def _shares(self, windows: Sequence[RankWindow]) -> list[Share]:
        shares = [
            Share(
                [self._collate(microbatch) for microbatch in window.microbatches],
                window.num_action_tokens,
                window.num_rollouts,
            )
            for window in windows
        ]
        self._payloads = {}  # copied into the batches; the object store may have its memory back
        return shares

    def _collate(self, microbatch: Microbatch) -> Batch:
        held = self._payloads
        rows = [
            (held.get(row.experience.segment_id) or row.experience.reload(self._store), row) for row in microbatch.rows
        ]
        return collate(rows, device=self._device, layout=self._setup.actor.layout)

    @property
    def _device(self) -> torch.device:
        return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


class ActorRank(_Rank):
    """One rank of the trained policy, with the frozen policies and a colocated critic."""

    def __init__(self, setup: RankSetup, store: PayloadStore):
        super().__init__(setup, store)
        self._refitter: Refitter | None = None
        self._version = 0
        """Updates that are in the policy's weights; -1 while one is being made, and for good if it failed."""

    def train(self, windows: Sequence[RankWindow], *, step: int, kl_coef: float) -> StepReport:
        """One update on this rank's share of the window: an optimizer step for each of `windows`.

        While the critic warms up the policy stays as it is, and the learning rate that is reported is 0.
        """
        setup, shares = self._setup, self._shares(windows)
        self._version = -1
        if step <= setup.num_warmup_updates:
            done = observe_policy(self._trainer, shares, step=step)
        else:
            done = update_policy(self._trainer, shares, step=step, algorithm=setup.algorithm, kl_coef=kl_coef)
        self._version = step
        if self._critic is None:
            return done
        return msgspec.structs.replace(done, metrics=done.metrics | self._critic.update(shares, step=step))

    def train_supervised(self, windows: Sequence[RankWindow], *, step: int) -> StepReport:
        """Maximum likelihood of the action tokens: an optimizer step for each of `windows`."""

        def negative_log_likelihood(
            batch: Batch, share: int, position: int
        ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
            del share, position
            return -self._logprobs(self._trainer.policy, batch), {}

        totals = optimise(self._trainer, self._shares(windows), step=step, loss_of=negative_log_likelihood)
        return report(totals, step=step, num_action_tokens=sum(window.num_action_tokens for window in windows))

    def save(self, folder: str, *, step: int, progress: Mapping[str, Any]) -> None:
        """Write a checkpoint after update `step`, with what the controller wants back of its own."""
        checkpoint.save(self._trainer, Path(folder), step=step, progress=progress, source=self._setup.model_path)
        if self._critic is not None:
            checkpoint.save_critic(self._critic.trainer, Path(folder), step=step)

    def export(self, folder: str) -> None:
        """Write the weights as a Hugging Face folder."""
        checkpoint.export(self._trainer, Path(folder), source=self._setup.model_path)

    def load(self, folder: str) -> tuple[int, dict[str, Any]]:
        """Resume from a checkpoint; returns its step, and what the controller gave with it."""
        if self._critic is not None:
            checkpoint.load_critic(self._critic.trainer, Path(folder))
        self._version, progress = checkpoint.load(self._trainer, Path(folder))
        return self._version, progress

    def connect(self, init: dict[str, Any], client: SyncClient, *, transfer: Transfer) -> None:
        """Join the weight-transfer group with the engines behind `client`; a former group is left."""
        if self._refitter is not None:
            self._refitter.shutdown()
        self._refitter = make_refitter(
            self._trainer.policy.model,
            transfer,
            rank=self._setup.rank,
            init=init,
            client=client,
            verify=self._setup.verify_refit,
        )

    def refit(self, at_least: int) -> RefitReport:
        """Send the weights to every engine, which serve them as the version that they are.

        Weights of a version below `at_least` are not sent.
        """
        if self._refitter is None:
            raise RuntimeError("refit before connect")
        if self._version < at_least:
            return RefitReport(version=self._version, sent=False)
        return RefitReport(version=self._version, interrupted=self._refitter.refit(self._version))

    def _load(self) -> Mapping[Role, Policy]:
        setup = self._setup
        policy = load_policy(setup.model_path, setup.actor)
        self._trainer = self._make_trainer(policy, setup.actor.optimizer, num_steps=setup.num_policy_steps)
        models: dict[Role, Policy] = {"policy": policy}
        if setup.reference_path is not None:
            models["reference"] = load_frozen(setup.reference_path, setup.actor)
        if setup.teacher_path is not None:
            models["teacher"] = load_frozen(setup.teacher_path, setup.actor)
        fields = {"old": policy} if setup.needs_old else {}
        fields |= {role: model for role, model in models.items() if role != "policy"}
        self._passes = {field: self._frozen_pass(model) for field, model in fields.items()}
        if setup.has_critic and setup.critic.placement == "colocated":
            models["critic"] = self._load_critic()
        return models

    def _frozen_pass(self, policy: Policy) -> Pass:
        def logprobs(batch: Batch) -> torch.Tensor:
            with torch.no_grad():
                return self._logprobs(policy, batch)

        return logprobs

    def _logprobs(self, policy: Policy, batch: Batch) -> torch.Tensor:
        logprobs_N, _ = action_logprobs(
            policy,
            batch,
            temperature=self._setup.temperature,
            chunk_size=self._setup.actor.logprob_chunk,
            with_entropy=False,
        )
        return logprobs_N


class CriticRank(_Rank):
    """One rank of a critic that has ranks of its own."""

    def train(self, windows: Sequence[RankWindow], *, step: int) -> dict[str, float]:
        """One update of the critic; returns its metrics."""
        return self._only.update(self._shares(windows), step=step)

    def save(self, folder: str, *, step: int) -> None:
        """Write the critic's part of the checkpoint after update `step`."""
        checkpoint.save_critic(self._only.trainer, Path(folder), step=step)

    def load(self, folder: str) -> None:
        """Resume from a checkpoint."""
        checkpoint.load_critic(self._only.trainer, Path(folder))

    def _load(self) -> Mapping[Role, Policy]:
        return {"critic": self._load_critic()}

    @property
    def _only(self) -> Critic:
        assert self._critic is not None
        return self._critic


def _by_row(columns: Mapping[str, torch.Tensor], microbatch: Microbatch) -> list[Scores]:
    """Each column [N], which runs row by row, cut at the ends of the rows."""
    ends = np.cumsum([row.experience.num_actions for row in microbatch.rows])[:-1]
    parts = {name: np.split(values_N.float().cpu().numpy(), ends) for name, values_N in columns.items()}
    return [Scores(**{name: part[i] for name, part in parts.items()}) for i in range(len(microbatch.rows))]
