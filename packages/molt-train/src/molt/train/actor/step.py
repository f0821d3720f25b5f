"""One update: forward and backward over a rank's microbatches, one optimizer step over all ranks."""

# Shapes: B rows, T tokens, V vocabulary, N action tokens of a microbatch.

import contextlib
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
from molt.train.loss.logprob import gather_logprobs
from molt.train.loss.reduce import window_token_mean
from molt.train.records.window import StepReport

Objective = Callable[[torch.Tensor, torch.Tensor, Batch], tuple[torch.Tensor, dict[str, torch.Tensor]]]
"""(current log-probs [N] with gradient, old log-probs [N], batch) -> (loss [N], sums over N to report as means)."""


@dataclass(frozen=True)
class Share:
    """This rank's part of one optimizer step."""

    batches: Sequence[Batch]
    num_action_tokens: int
    """Of the whole step, over all ranks: the one denominator of the token mean."""


@dataclass
class Trainer:
    """What an update needs and changes."""

    policy: Policy
    optimizer: torch.optim.Optimizer
    schedule: torch.optim.lr_scheduler.LRScheduler
    max_grad_norm: float
    temperature: float


def update(trainer: Trainer, shares: Sequence[Share], *, step: int, objective: Objective) -> StepReport:
    """Make one optimizer step for each of `shares`, which together are one window. All ranks call this alike.

    The old log-probs are those of the weights before the first of the steps. Raises ActorError when a loss or a
    gradient is not finite; the optimizer step concerned is not made. A step without action tokens is not made either:
    AdamW would move the weights all the same.
    """
    shares = [share for share in shares if share.num_action_tokens]
    totals = _Totals(trainer.policy.device)
    olds = [_old_logprobs(trainer, share) if len(shares) > 1 else None for share in shares]
    for share, old in zip(shares, olds, strict=True):
        _optimizer_step(trainer, share, old, totals, objective=objective, step=step)
    return totals.report(step=step, num_action_tokens=sum(share.num_action_tokens for share in shares))


def _old_logprobs(trainer: Trainer, share: Share) -> list[torch.Tensor]:
    with torch.no_grad():
        return [action_logprobs(trainer, batch) for batch in share.batches]


def _optimizer_step(
    trainer: Trainer,
    share: Share,
    old: list[torch.Tensor] | None,
    totals: "_Totals",
    *,
    objective: Objective,
    step: int,
) -> None:
    trainer.optimizer.zero_grad(set_to_none=True)
    dp_size = trainer.policy.dp_size
    for index, batch in enumerate(share.batches):
        current_N = action_logprobs(trainer, batch)
        # With a single step a window the policy before it is the one of this very pass.
        old_N = current_N.detach() if old is None else old[index]
        loss_N, sums = objective(current_N, old_N, batch)
        loss = window_token_mean(loss_N, num_action_tokens=share.num_action_tokens, dp_size=dp_size)
        loss.backward()
        totals.add(loss_N.detach(), old_N, batch, sums)
    grad_norm = _clip(trainer)
    totals.all_reduce()
    if not math.isfinite(grad_norm) or not math.isfinite(totals.loss_sum):
        raise ActorError(
            f"update {step}: gradient norm {grad_norm}, loss sum {totals.loss_sum}: not finite, not applied"
        )
    totals.grad_norms.append(grad_norm)
    totals.lr = trainer.optimizer.param_groups[0]["lr"]
    trainer.optimizer.step()
    trainer.schedule.step()


def action_logprobs(trainer: Trainer, batch: Batch) -> torch.Tensor:
    """Log-prob of every action token of `batch` under the current weights, float32 [N]."""
    with _compute_dtype(trainer.policy):
        logits_BTV = trainer.policy.model(
            input_ids=batch.input_ids_BT, attention_mask=batch.attention_mask_BT, use_cache=False
        ).logits
    logits_NV = logits_BTV[batch.predicts_action_BT]
    # An inert row has no action, but an empty selection still is part of the graph: every rank runs the same backward.
    return gather_logprobs(logits_NV, batch.targets_N, temperature=trainer.temperature)


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
    """Sums over the window's action tokens, of all ranks once a step is reduced."""

    def __init__(self, device: torch.device):
        self._device = device
        self._local: dict[str, torch.Tensor] = {}
        self._gap_max = torch.zeros((), device=device)
        self._sums: Counter[str] = Counter()
        self.grad_norms: list[float] = []
        self.lr = 0.0

    def add(self, loss_N: torch.Tensor, old_N: torch.Tensor, batch: Batch, sums: dict[str, torch.Tensor]) -> None:
        """Count a microbatch of this rank."""
        gap_N = (old_N - batch.behaviour_N).abs()
        parts = {"loss": loss_N.sum(), "logprob_gap": gap_N.sum(), "logprob_mean": old_N.sum(), **sums}
        for name, value in parts.items():
            self._local[name] = self._local.get(name, torch.zeros((), device=self._device)) + value.detach()
        if gap_N.numel():
            self._gap_max = torch.maximum(self._gap_max, gap_N.max())

    def all_reduce(self) -> None:
        """Add up what the ranks have counted since the last time."""
        names = sorted(self._local)
        packed = torch.stack([self._local[name].float() for name in names])
        torch.distributed.all_reduce(packed)
        torch.distributed.all_reduce(self._gap_max, op=torch.distributed.ReduceOp.MAX)
        self._sums.update(dict(zip(names, packed.tolist(), strict=True)))
        self._local.clear()

    @property
    def loss_sum(self) -> float:
        return self._sums["loss"]

    def report(self, *, step: int, num_action_tokens: int) -> StepReport:
        """Means over the window; the gradient norm is the mean over its optimizer steps."""
        means = {name: value / max(1, num_action_tokens) for name, value in self._sums.items()}
        return StepReport(
            step=step,
            loss=means.pop("loss", 0.0),
            grad_norm=sum(self.grad_norms) / max(1, len(self.grad_norms)),
            lr=self.lr,
            logprob_gap_mean=means.pop("logprob_gap", 0.0),
            logprob_gap_max=float(self._gap_max),
            metrics=means,
        )
