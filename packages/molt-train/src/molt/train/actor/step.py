"""One update: forward and backward over a rank's microbatches, one optimizer step over all ranks."""

# Shapes: B rows, T tokens, V vocabulary, N action tokens of a microbatch.

import contextlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from nemo_automodel.components.distributed.tp_replicas import synchronize_tp_replica_gradients
from nemo_automodel.components.training.utils import scale_grads_and_clip_grad_norm

from molt.train.actor.batch import Batch
from molt.train.actor.model import Policy
from molt.train.errors import ActorError
from molt.train.loss.logprob import gather_logprobs
from molt.train.loss.reduce import window_token_mean
from molt.train.records.window import StepReport

Objective = Callable[[torch.Tensor, Batch], tuple[torch.Tensor, dict[str, torch.Tensor]]]
"""(current log-probs [N] with gradient, batch) -> (per-token loss [N], sums over N to report as means)."""


@dataclass
class Trainer:
    """What an update needs and changes."""

    policy: Policy
    optimizer: torch.optim.Optimizer
    schedule: torch.optim.lr_scheduler.LRScheduler
    max_grad_norm: float
    temperature: float


def update(
    trainer: Trainer, batches: Sequence[Batch], *, step: int, num_action_tokens: int, objective: Objective
) -> StepReport:
    """Make one optimizer step on the window of which `batches` are this rank's share.

    `num_action_tokens` counts the whole window over all ranks: the one denominator of the token mean. Every rank must
    call this with equally many batches. Raises ActorError, before the weights are touched, when the loss or the
    gradient is not finite.
    """
    trainer.optimizer.zero_grad(set_to_none=True)
    totals = _Totals(trainer.policy.device)
    for batch in batches:
        current_N = action_logprobs(trainer, batch)
        loss_N, sums = objective(current_N, batch)
        dp_size = trainer.policy.dp_size
        loss = window_token_mean(loss_N, num_action_tokens=num_action_tokens, dp_size=dp_size)
        loss.backward()
        totals.add(loss.detach() / dp_size, current_N.detach(), batch, sums)
    grad_norm = _clip(trainer)
    totals.all_reduce()
    if not math.isfinite(grad_norm) or not math.isfinite(totals.loss):
        raise ActorError(f"update {step}: loss {totals.loss} and gradient norm {grad_norm} must be finite; not applied")
    lr = trainer.optimizer.param_groups[0]["lr"]
    trainer.optimizer.step()
    trainer.schedule.step()
    return totals.report(step=step, grad_norm=grad_norm, lr=lr, num_action_tokens=num_action_tokens)


def action_logprobs(trainer: Trainer, batch: Batch) -> torch.Tensor:
    """Log-prob of every action token of `batch` under the current weights, float32 [N]."""
    with _compute_dtype(trainer.policy):
        logits_BTV = trainer.policy.model(
            input_ids=batch.input_ids_BT, attention_mask=batch.attention_mask_BT, use_cache=False
        ).logits
    logits_NV = logits_BTV[batch.predicts_action_BT]
    # An inert row has no action: its zero keeps every rank's backward pass, and so its collectives, alike.
    return gather_logprobs(logits_NV, batch.targets_N, temperature=trainer.temperature) + 0.0 * logits_BTV[:, 0, 0].sum()


def _compute_dtype(policy: Policy) -> contextlib.AbstractContextManager[object]:
    """FSDP casts on more than one rank; a single rank is not wrapped, so autocast does it there."""
    if policy.compute_dtype == torch.float32 or policy.dp_size > 1:
        return contextlib.nullcontext()
    return torch.autocast(policy.device.type, dtype=policy.compute_dtype)


def _clip(trainer: Trainer) -> float:
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


class _Totals:
    """Sums over the window, first of this rank, then of all."""

    def __init__(self, device: torch.device):
        self._sums: dict[str, torch.Tensor] = {}
        self._gap_max = torch.zeros((), device=device)
        self._device = device

    def add(
        self, loss: torch.Tensor, current_N: torch.Tensor, batch: Batch, sums: dict[str, torch.Tensor]
    ) -> None:
        gap_N = (current_N - batch.behaviour_N).abs()
        parts = {"loss": loss, "logprob_gap": gap_N.sum(), "logprob_mean": current_N.sum(), **sums}
        for name, value in parts.items():
            self._sums[name] = self._sums.get(name, torch.zeros((), device=self._device)) + value.detach()
        if gap_N.numel():
            self._gap_max = torch.maximum(self._gap_max, gap_N.max())

    def all_reduce(self) -> None:
        names = sorted(self._sums)
        packed = torch.stack([self._sums[name].float() for name in names])
        torch.distributed.all_reduce(packed)
        torch.distributed.all_reduce(self._gap_max, op=torch.distributed.ReduceOp.MAX)
        self._values = dict(zip(names, packed.tolist(), strict=True))

    @property
    def loss(self) -> float:
        return self._values["loss"]

    def report(self, *, step: int, grad_norm: float, lr: float, num_action_tokens: int) -> StepReport:
        means = {name: value / max(1, num_action_tokens) for name, value in self._values.items() if name != "loss"}
        return StepReport(
            step=step,
            loss=self.loss,
            grad_norm=grad_norm,
            lr=lr,
            logprob_gap_mean=means.pop("logprob_gap"),
            logprob_gap_max=float(self._gap_max),
            metrics=means,
        )
