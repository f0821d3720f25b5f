"""The process of one rank: what its Ray actor can be asked to do."""

from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

import torch

from molt.train.actor import checkpoint
from molt.train.actor.batch import Batch, collate
from molt.train.actor.model import load_policy
from molt.train.actor.optimizer import make_optimizer, make_schedule
from molt.train.actor.setup import RankSetup
from molt.train.actor.step import Objective, Share, Trainer, update
from molt.train.experience import PayloadStore
from molt.train.loss import policy_loss
from molt.train.records.window import Microbatch, RankWindow, StepReport
from molt.train.refit.sender import SyncClient, Transfer, WeightSender, make_sender


class VersionedClient(SyncClient, Protocol):
    """The engines' control plane; `version` is what the next finished update is served as."""

    version: int


class ActorRank:
    """One rank of the trained policy. Every method is called on all ranks together."""

    def __init__(self, setup: RankSetup, store: PayloadStore):
        self._setup, self._store = setup, store
        self._sender: WeightSender | None = None

    def start(self, rendezvous: str) -> int:
        """Join the process group at `rendezvous` (`tcp://host:port`) and load the policy. Returns its parameters."""
        setup = self._setup
        torch.set_num_threads(1)  # ranks, engines and gateway share the cores; more threads spin against each other
        torch.manual_seed(setup.seed)
        torch.distributed.init_process_group(
            "nccl" if torch.cuda.is_available() else "gloo",
            init_method=rendezvous,
            rank=setup.rank,
            world_size=setup.world_size,
            timeout=timedelta(seconds=setup.collective_timeout_s),
        )
        policy = load_policy(setup.model_path, setup.actor)
        optimizer = make_optimizer(policy.model, setup.actor.optimizer)
        self._trainer = Trainer(
            policy=policy,
            optimizer=optimizer,
            schedule=make_schedule(optimizer, setup.actor.optimizer, num_steps=setup.num_steps),
            max_grad_norm=setup.actor.optimizer.max_grad_norm,
            temperature=setup.temperature,
        )
        return sum(p.numel() for p in policy.model.parameters())

    def train(self, windows: Sequence[RankWindow], *, step: int) -> StepReport:
        """One policy update on this rank's share of the window: an optimizer step for each of `windows`."""
        return self._update(windows, step, self._policy_objective)

    def train_supervised(self, windows: Sequence[RankWindow], *, step: int) -> StepReport:
        """Maximum likelihood of the action tokens: an optimizer step for each of `windows`."""
        return self._update(windows, step, _negative_log_likelihood)

    def save(self, folder: str, *, step: int) -> None:
        """Write a checkpoint after update `step`."""
        checkpoint.save(self._trainer, Path(folder), step=step, source=self._setup.model_path)

    def export(self, folder: str) -> None:
        """Write the weights as a Hugging Face folder."""
        checkpoint.export(self._trainer, Path(folder), source=self._setup.model_path)

    def load(self, folder: str) -> int:
        """Resume from a checkpoint; returns its step."""
        return checkpoint.load(self._trainer, Path(folder))

    def connect(self, init: dict[str, Any], client: VersionedClient, *, transfer: Transfer) -> None:
        """Join the weight-transfer group with the engines behind `client`; a former group is left."""
        if self._sender is not None:
            self._sender.shutdown()
        self._client = client
        self._sender = make_sender(
            self._trainer.policy.model, transfer, rank=self._setup.rank, init=init, client=client
        )

    def refit(self, version: int) -> None:
        """Send the weights to every engine, which serves them as policy version `version`."""
        if self._sender is None:
            raise RuntimeError("refit before connect")
        self._client.version = version
        self._sender.send_weights()

    def _update(self, windows: Sequence[RankWindow], step: int, objective: Objective) -> StepReport:
        shares = [
            Share([self._reload(microbatch) for microbatch in window.microbatches], window.num_action_tokens)
            for window in windows
        ]
        return update(self._trainer, shares, step=step, objective=objective)

    def _reload(self, microbatch: Microbatch) -> Batch:
        rows = [(self._store.get(row.experience.payload), row.advantages) for row in microbatch.rows]
        return collate(rows, device=self._trainer.policy.device)

    def _policy_objective(
        self, current_N: torch.Tensor, old_N: torch.Tensor, batch: Batch
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        return policy_loss(current_N, old_N, batch.behaviour_N, batch.advantages_N, settings=self._setup.algorithm)


def _negative_log_likelihood(
    current_N: torch.Tensor, old_N: torch.Tensor, batch: Batch
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    del old_N, batch  # every action token counts alike
    return -current_N, {}
