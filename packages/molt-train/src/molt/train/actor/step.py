"""Optimizer steps: forward and backward over microbatches, one step over all ranks, nothing non-finite kept."""

# Shapes: N action tokens of a microbatch.

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from nemo_automodel.components.distributed.tp_replicas import synchronize_tp_replica_gradients
from nemo_automodel.components.training.utils import scale_grads_and_clip_grad_norm

from molt.train.actor.batch import Batch
from molt.train.actor.model import Policy
from molt.train.errors import ActorError
from molt.train.loss.reduce import weighted_sum

LossOf = Callable[[Batch, int, int], tuple[torch.Tensor, dict[str, torch.Tensor]]]
"""(microbatch, index of its share, index in its share) -> (loss [N] with gradient, sums over N to report as means).

A name that ends in `_max` is a maximum instead."""

_MAX_NAMED = 8
"""Rollouts that an error names."""


@dataclass(frozen=True)
class Share:
    """This rank's part of one optimizer step."""

    batches: Sequence[Batch]
    num_action_tokens: int
    """Of the whole step, over all ranks."""
    num_rollouts: int
    """That `Batch.rollout_N` numbers, over all ranks and steps of the window."""


@dataclass
class Trainer:
    """What an update needs and changes."""

    policy: Policy
    optimizer: torch.optim.Optimizer
    schedule: torch.optim.lr_scheduler.LRScheduler
    max_grad_norm: float
    temperature: float
    logprob_chunk: int = 1024
    """Action tokens whose logits exist at a time."""


class Totals:
    """What the steps of an update add up to, over the ranks."""

    def __init__(self, device: torch.device):
        self._device = device
        self._local: dict[str, torch.Tensor] = {}
        self._sums: Counter[str] = Counter()
        self._maxima: dict[str, float] = {}
        self.losses: list[float] = []
        """One a step."""
        self.grad_norms: list[float] = []
        self.lr = 0.0
        """Of the last step."""

    def add(self, sums: dict[str, torch.Tensor]) -> None:
        """Count a microbatch of this rank."""
        for name, value in sums.items():
            known = self._local.get(name, torch.zeros((), device=self._device))
            wide = value.detach().float()
            self._local[name] = torch.maximum(known, wide) if name.endswith("_max") else known + wide

    def all_reduce(self) -> None:
        """Take together what the ranks have counted since the last time."""
        for is_maximum, operation in ((False, torch.distributed.ReduceOp.SUM), (True, torch.distributed.ReduceOp.MAX)):
            names = sorted(name for name in self._local if name.endswith("_max") == is_maximum)
            if not names:
                continue
            packed = torch.stack([self._local[name] for name in names])
            torch.distributed.all_reduce(packed, op=operation)
            found = dict(zip(names, packed.tolist(), strict=True))
            if is_maximum:
                for name, value in found.items():
                    self._maxima[name] = max(float(value), self._maxima.get(name, -math.inf))
            else:
                self._sums.update(found)
        self._local.clear()

    def take(self, name: str) -> float:
        """A sum over all ranks so far, which is not among the means then."""
        return self._sums.pop(name, 0.0)

    def means(self, num_action_tokens: int) -> dict[str, float]:
        """Sums over so many action tokens, and maxima as they are."""
        return {name: value / max(1, num_action_tokens) for name, value in self._sums.items()} | self._maxima


def optimise(trainer: Trainer, shares: Sequence[Share], *, step: int, loss_of: LossOf) -> Totals:
    """Make one optimizer step for each of `shares`. All ranks call this alike.

    A step without action tokens is not made: AdamW would move the weights all the same.

    Raises:
        ActorError: A loss or a gradient is not finite. It names the rollouts; that optimizer step is not made.
    """
    totals = Totals(trainer.policy.device)
    for index, share in enumerate(shares):
        if share.num_action_tokens:
            _optimizer_step(trainer, share, index, totals, loss_of=loss_of, step=step)
    return totals


def _optimizer_step(trainer: Trainer, share: Share, index: int, totals: Totals, *, loss_of: LossOf, step: int) -> None:
    trainer.optimizer.zero_grad(set_to_none=True)
    blamed: list[str] = []
    for position, batch in enumerate(share.batches):
        loss_N = _backward(trainer, batch, loss_of=lambda b, at=position: loss_of(b, index, at), totals=totals)
        blamed += _rollouts_of(batch, ~torch.isfinite(loss_N))
    grad_norm = clip(trainer)
    totals.all_reduce()
    loss = totals.take("loss")
    if not math.isfinite(loss):
        _refuse(f"update {step}: the loss is {loss}", blamed)
    if not math.isfinite(grad_norm):
        blamed = _blame(trainer, share, lambda batch, at: loss_of(batch, index, at))
        _refuse(f"update {step}: the gradient norm is {grad_norm}", blamed)
    totals.losses.append(loss)
    totals.grad_norms.append(grad_norm)
    totals.lr = trainer.optimizer.param_groups[0]["lr"]
    trainer.optimizer.step()
    trainer.schedule.step()


def _backward(
    trainer: Trainer,
    batch: Batch,
    *,
    loss_of: Callable[[Batch], tuple[torch.Tensor, dict[str, torch.Tensor]]],
    totals: Totals,
) -> torch.Tensor:
    loss_N, sums = loss_of(batch)
    weighted_sum(loss_N, batch.weights_N, dp_size=trainer.policy.dp_size).backward()
    totals.add({"loss": (loss_N.detach() * batch.weights_N).sum(), **sums})
    return loss_N.detach()


def clip(trainer: Trainer) -> float:
    """Make the gradients of all ranks those of the window, and scale them down to `max_grad_norm`.

    Returns:
        Their norm before that.
    """
    mesh, models = trainer.policy.mesh, [trainer.policy.model]
    synchronize_tp_replica_gradients(models, mesh.device_mesh)
    norm = scale_grads_and_clip_grad_norm(
        trainer.max_grad_norm,
        models,
        device_mesh=mesh.device_mesh,
        moe_mesh=mesh.moe_mesh,
        ep_axis_name="ep" if mesh.moe_mesh is not None else None,
        dp_group_size=trainer.policy.dp_size,
    )
    return float(norm)


def _rollouts_of(batch: Batch, is_bad_N: torch.Tensor) -> list[str]:
    rows = torch.unique(batch.sequence_N[is_bad_N]).tolist()
    return [batch.rollout_ids[row] for row in rows]


def _blame(
    trainer: Trainer, share: Share, loss_of: Callable[[Batch, int], tuple[torch.Tensor, dict[str, torch.Tensor]]]
) -> list[str]:
    """This rank's rollouts of the microbatches whose gradient alone is not finite: one more pass, on the way out."""
    blamed: list[str] = []
    for position, batch in enumerate(share.batches):
        trainer.optimizer.zero_grad(set_to_none=True)
        loss_N, _ = loss_of(batch, position)
        weighted_sum(loss_N, batch.weights_N, dp_size=trainer.policy.dp_size).backward()
        if not math.isfinite(clip(trainer)):
            blamed += batch.rollout_ids
    return blamed


def _refuse(what: str, blamed: Sequence[str]) -> None:
    """Raise the same error on all ranks."""
    everyone: list[list[str]] = [[] for _ in range(torch.distributed.get_world_size())]
    torch.distributed.all_gather_object(everyone, list(blamed))
    names = sorted({name for names in everyone for name in names})
    more = f" and {len(names) - _MAX_NAMED} more" if len(names) > _MAX_NAMED else ""
    raise ActorError(f"{what}: not applied. Of rollouts {', '.join(names[:_MAX_NAMED])}{more}")
