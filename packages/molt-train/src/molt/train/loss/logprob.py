"""Log-probs and entropies of sampled tokens, some positions at a time, so that the full logits never exist."""

# Shapes: N action tokens, C of a chunk of them, H hidden, V vocabulary (of this rank, where the head is sharded).

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp, all_reduce
from torch.distributed.tensor import DTensor, Shard
from torch.utils.checkpoint import checkpoint


def head_logprobs(
    hidden_NH: Tensor,
    weight_VH: Tensor,
    targets_N: Tensor,
    *,
    temperature: float,
    chunk_size: int,
    with_entropy: bool,
    bias_V: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Take log softmax((hidden weight^T + bias) / temperature) at the targets, and entropies of these distributions.

    The logits of `chunk_size` positions exist at a time. The backward pass computes them again and adds the gradient
    of the weight up in place. Logits, softmax and sums are float32 or wider whatever the operands are, which under
    autocast are of its dtype. The temperature divides the logits, as the sampler's did; dividing the log-probs would
    be another distribution.

    A DTensor `weight_VH` is one of tensor parallelism: all ranks of its mesh pass the same positions. Where it is
    sharded over the vocabulary, a rank computes its own columns of the logits, and only sums over them travel.

    Why not a library's: `torch.nn.functional.linear_cross_entropy` (torch 2.13) gives no entropy, takes no DTensor,
    rounds its result to the dtype of its input, which for bfloat16 is too coarse for ratios, and adds up the rows of
    the targets in no fixed order on CUDA. Where all that does not matter it takes the same time and memory as this, so
    one implementation serves every case. Cut cross-entropy's kernels need a GPU. What Liger fuses with the head are
    whole losses: they give no log-prob and entropy of each token, which the corrections and the pass before an update
    need.

    Args:
        hidden_NH: Last hidden states of the positions that predict the targets.
        weight_VH: Of the head.
        targets_N: int64, the sampled tokens.
        temperature: That of sampling, above 0.
        chunk_size: Positions whose logits exist at a time.
        with_entropy: Give entropies, too; they have a gradient.
        bias_V: Of the head, sharded as the weight is.

    Returns:
        Log-probs [N], and entropies [N] in nats or None: float32, or float64 for float64 operands. Without positions
        they are empty and part of the graph all the same.
    """
    shard = _vocabulary_shard(weight_VH)
    bias_V = None if bias_V is None else _operand(bias_V, shard)
    plan = _Plan(temperature, chunk_size, with_entropy, shard)
    logprobs_N, entropy_N = _HeadLogprobs.apply(  # pyright: ignore[reportGeneralTypeIssues]
        _operand(hidden_NH, None), _operand(weight_VH, shard), bias_V, targets_N, plan
    )
    return logprobs_N, entropy_N


def gather_logprobs(
    logits_NV: Tensor, targets_N: Tensor, *, temperature: float, chunk_size: int, with_entropy: bool
) -> tuple[Tensor, Tensor | None]:
    """What `head_logprobs` gives, of logits that exist: for models that change them after the head.

    Args:
        logits_NV: Logits that predict the targets: row j belongs to the token before target j.
        targets_N: int64, the sampled tokens.
        temperature: That of sampling, above 0. It divides the logits.
        chunk_size: Positions whose wide copies exist at a time; the backward pass computes them again.
        with_entropy: Give entropies, too.

    Returns:
        As `head_logprobs`.
    """
    chunks = zip(logits_NV.split(chunk_size), targets_N.split(chunk_size), strict=True)
    parts = [checkpoint(_gather, logits, targets, temperature, use_reentrant=False) for logits, targets in chunks]
    logprobs_N, entropy_N = (torch.cat(part) for part in zip(*parts, strict=True))
    return logprobs_N, entropy_N if with_entropy else None


def _gather(logits_CV: Tensor, targets_C: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    wide_CV = logits_CV.to(torch.promote_types(logits_CV.dtype, torch.float32)) / temperature
    logprobs_CV = wide_CV.log_softmax(-1)
    entropy_C = -(logprobs_CV.exp() * logprobs_CV).sum(-1)
    return logprobs_CV.gather(-1, targets_C.unsqueeze(-1)).squeeze(-1), entropy_C


@dataclass(frozen=True)
class _Shard:
    """Which tokens of the vocabulary this rank has."""

    group: ProcessGroup
    first: int


def _vocabulary_shard(weight_VH: Tensor) -> _Shard | None:
    if not isinstance(weight_VH, DTensor) or weight_VH.placements != (Shard(0),):
        return None
    mesh = weight_VH.device_mesh
    each = -(-weight_VH.shape[0] // mesh.size())  # what is missing to a multiple is missing at the last rank
    return _Shard(group=mesh.get_group(), first=mesh.get_local_rank() * each)


def _operand(tensor: Tensor, shard: _Shard | None) -> Tensor:
    """As a plain tensor, this rank's part of it if there is a `shard`, of the dtype that autocast asks for."""
    if isinstance(tensor, DTensor):
        tensor = tensor.to_local() if shard else tensor.full_tensor()
    device = tensor.device.type
    return tensor.to(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else tensor


@dataclass(frozen=True)
class _Plan:
    temperature: float
    chunk_size: int
    with_entropy: bool
    shard: _Shard | None
    """None: the whole vocabulary is here."""

    def reduce(self, values: Tensor, operation: ReduceOp.RedOpType = ReduceOp.SUM) -> Tensor:
        """`values`, in place, over all ranks of the vocabulary."""
        if self.shard:
            all_reduce(values, op=operation, group=self.shard.group)
        return values

    def at_targets(self, targets_C: Tensor, values_CV: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Columns of the targets, the values there, and which of them are this rank's; of others any column. [C, 1]."""
        columns_C1 = targets_C.unsqueeze(-1) - (self.shard.first if self.shard else 0)
        width = values_CV.shape[-1]
        inside_C1 = columns_C1.clamp(0, width - 1)
        return inside_C1, values_CV.gather(-1, inside_C1), inside_C1 == columns_C1


class _Head:
    """The products with the weight of the head in one pass over the chunks."""

    def __init__(self, hidden_NH: Tensor, weight_VH: Tensor, bias_V: Tensor | None, plan: _Plan):
        self._hidden_NH, self._weight_VH, self._bias_V, self._plan = hidden_NH, weight_VH, bias_V, plan
        self.wide = torch.promote_types(hidden_NH.dtype, torch.float32)
        self.chunks = [slice(i, i + plan.chunk_size) for i in range(0, len(hidden_NH), plan.chunk_size)]
        # A new buffer for each chunk would cost as much time as its softmax does, in page faults.
        self._logits_CV = self.new_buffer()

    def new_buffer(self) -> Tensor:
        """Room for the logits of a chunk."""
        size = min(self._plan.chunk_size, len(self._hidden_NH))
        return self._hidden_NH.new_empty(size, len(self._weight_VH), dtype=self.wide)

    def logits(self, chunk: slice) -> Tensor:
        """Logits over the temperature, [C, V], for the caller to overwrite; the next call does it, too."""
        hidden_CH = self._hidden_NH[chunk]
        logits_CV = self._product(hidden_CH, self._weight_VH.T, out=self._logits_CV[: len(hidden_CH)])
        if self._bias_V is not None:
            logits_CV += self._bias_V
        return logits_CV if self._plan.temperature == 1.0 else logits_CV.div_(self._plan.temperature)

    def hidden_gradient(self, grad_CV: Tensor) -> Tensor:
        """[C, H], from the gradient of the logits: what this rank's part of the vocabulary adds to it."""
        grad_CH = grad_CV.new_empty(len(grad_CV), self._weight_VH.shape[-1])
        return self._product(grad_CV, self._weight_VH, out=grad_CH)

    def add_weight_gradient(self, total_VH: Tensor, grad_CV: Tensor, chunk: slice) -> None:
        """Add what a chunk gives."""
        hidden_CH = self._hidden_NH[chunk]
        if self._takes_narrow(total_VH):
            total_VH += self._product(grad_CV.T, hidden_CH, out=torch.empty_like(total_VH))
        else:
            total_VH.addmm_(grad_CV.T, hidden_CH.to(self.wide))

    def _product(self, left: Tensor, right: Tensor, *, out: Tensor) -> Tensor:
        if self._takes_narrow(out):
            narrow = self._hidden_NH.dtype
            return torch.mm(left.to(narrow), right.to(narrow), out_dtype=self.wide, out=out)
        return torch.mm(left.to(self.wide), right.to(self.wide), out=out)

    def _takes_narrow(self, out: Tensor) -> bool:
        """CUDA multiplies half precision and adds up in float32; a CPU is faster with all of it in float32."""
        return out.is_cuda and self._hidden_NH.dtype != self.wide


class _HeadLogprobs(torch.autograd.Function):
    """`head_logprobs` of plain tensors.

    With z the logits over the temperature, p their softmax and H its entropy, the derivatives with respect to z_j are
    [j is the target] - p_j for the log-prob, and -p_j (log p_j + H) for the entropy.
    """

    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, hidden_NH: Tensor, weight_VH: Tensor, bias_V: Tensor | None, targets_N: Tensor, plan: _Plan
    ) -> tuple[Tensor, Tensor | None]:
        head = _Head(hidden_NH, weight_VH, bias_V, plan)
        logprobs_N = hidden_NH.new_empty(len(hidden_NH), dtype=head.wide)
        normalizers_N = torch.empty_like(logprobs_N)
        entropy_N = torch.empty_like(logprobs_N) if plan.with_entropy else None
        exps_CV = head.new_buffer() if plan.with_entropy else None
        for chunk in head.chunks:
            logits_CV = head.logits(chunk)
            top_C = plan.reduce(logits_CV.amax(-1), ReduceOp.MAX)
            logits_CV -= top_C.unsqueeze(-1)
            _, at_targets_C1, is_here_C1 = plan.at_targets(targets_N[chunk], logits_CV)
            target_C = plan.reduce(torch.where(is_here_C1, at_targets_C1, 0.0).squeeze(-1))
            # Without entropies the exponentials take the place of the logits.
            exp_CV = torch.exp(logits_CV, out=logits_CV if exps_CV is None else exps_CV[: len(logits_CV)])
            sum_C = plan.reduce(exp_CV.sum(-1))
            if entropy_N is not None:
                entropy_N[chunk] = sum_C.log() - plan.reduce(exp_CV.mul_(logits_CV).sum(-1)) / sum_C
            normalizers_N[chunk] = top_C + sum_C.log()
            logprobs_N[chunk] = target_C - sum_C.log()
        ctx.plan = plan
        ctx.set_materialize_grads(False)  # entropies that no loss uses cost nothing
        ctx.save_for_backward(hidden_NH, weight_VH, bias_V, targets_N, normalizers_N, entropy_N)
        return logprobs_N, entropy_N

    @staticmethod
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, grad_logprobs_N: Tensor | None, grad_entropy_N: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        hidden_NH, weight_VH, bias_V, targets_N, normalizers_N, entropy_N = ctx.saved_tensors
        plan, head = ctx.plan, _Head(hidden_NH, weight_VH, bias_V, ctx.plan)
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        grad_hidden_NH = torch.empty_like(hidden_NH, dtype=head.wide) if needs_hidden else None
        grad_weight_VH = torch.zeros_like(weight_VH, dtype=head.wide) if needs_weight else None
        grad_bias_V = torch.zeros_like(bias_V, dtype=head.wide) if needs_bias else None
        if grad_logprobs_N is None:
            grad_logprobs_N = torch.zeros_like(normalizers_N)
        probs_CV = None if grad_entropy_N is None else head.new_buffer()
        for chunk in head.chunks:
            grad_CV = head.logits(chunk).sub_(normalizers_N[chunk].unsqueeze(-1))
            upstream_C1 = grad_logprobs_N[chunk].unsqueeze(-1) / plan.temperature
            if grad_entropy_N is None or probs_CV is None:
                grad_CV.exp_().mul_(-upstream_C1)
            else:
                prob_CV = torch.exp(grad_CV, out=probs_CV[: len(grad_CV)])
                grad_CV += entropy_N[chunk].unsqueeze(-1)
                grad_CV.mul_(grad_entropy_N[chunk].unsqueeze(-1) / plan.temperature)
                grad_CV.add_(upstream_C1).mul_(prob_CV).neg_()
            columns_C1, at_targets_C1, is_here_C1 = plan.at_targets(targets_N[chunk], grad_CV)
            # Not scatter_add_, whose order on CUDA is not fixed; a row has one target.
            grad_CV.scatter_(-1, columns_C1, at_targets_C1 + torch.where(is_here_C1, upstream_C1, 0.0))
            if grad_hidden_NH is not None:
                grad_hidden_NH[chunk] = head.hidden_gradient(grad_CV)
            if grad_weight_VH is not None:
                head.add_weight_gradient(grad_weight_VH, grad_CV, chunk)
            if grad_bias_V is not None:
                grad_bias_V += grad_CV.sum(0)
        if grad_hidden_NH is not None:
            plan.reduce(grad_hidden_NH)
        # The engine casts them to the dtypes of the operands.
        return grad_hidden_NH, grad_weight_VH, grad_bias_V, None, None
