"""AdamW or Muon over the trained weights, and the schedule of the learning rate."""

# Shapes: A, B rows and columns of a weight matrix.

import math
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import DTensor, distribute_tensor

from molt.train.config import OptimizerConfig

MOMENTUM = 0.95
NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
NEWTON_SCHULZ_STEPS = 5
NORM_FLOOR = 1e-7  # a gradient of zeros is not divided by 0
OUTPUT_HEAD = "lm_head"


def make_optimizer(model: torch.nn.Module, settings: OptimizerConfig) -> torch.optim.Optimizer:
    """The optimizer of every trainable parameter of `model`, sharded or not; norms and biases are not decayed."""
    trained = [p for p in model.parameters() if p.requires_grad]
    if settings.name == "adamw":
        return _adamw(trained, settings)
    embeddings = embedding_parameters(model)
    matrices = [p for p in trained if is_hidden_matrix(p, embeddings)]
    return Muon(matrices, [p for p in trained if not is_hidden_matrix(p, embeddings)], settings)


def embedding_parameters(model: torch.nn.Module) -> set[torch.nn.Parameter]:
    """The weights of the input embeddings and of the language-model head; one where they are tied."""
    layers = [module for module in model.modules() if isinstance(module, torch.nn.Embedding)]
    embeddings = {p for layer in layers for p in layer.parameters()}
    return embeddings | {p for name, p in model.named_parameters() if OUTPUT_HEAD in name.split(".")}


def is_hidden_matrix(parameter: torch.nn.Parameter, embeddings: set[torch.nn.Parameter]) -> bool:
    """Whether Muon moves it: a matrix between hidden layers. A bank of experts' matrices is left to AdamW."""
    return parameter.ndim == 2 and min(parameter.shape) > 1 and parameter not in embeddings


def _adamw(parameters: list[torch.nn.Parameter], settings: OptimizerConfig) -> torch.optim.AdamW:
    groups = [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": settings.weight_decay},
        {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=settings.lr,
        betas=(settings.beta1, settings.beta2),
        eps=settings.eps,
        fused=True,  # one kernel over all weights, on CUDA and on the CPU, and no temporary copies of them
    )


class Muon(torch.optim.Optimizer):
    """Muon for the matrices of the hidden layers (arXiv:2502.16982), AdamW for everything else.

    The momentum of a matrix is orthogonalised and scaled to the size that AdamW's steps have, so one learning rate
    serves both. It differs from `torch.optim.Muon` in that a sharded matrix is gathered first and each rank
    orthogonalises the whole of it: the same step on any number of ranks, but for the rounding of their gradients, and
    one collective instead of one for each of its products. Both halves are one optimizer, whose state is checkpointed
    as that of any other.
    """

    def __init__(self, matrices: list[torch.nn.Parameter], others: list[torch.nn.Parameter], settings: OptimizerConfig):
        self._adamw = _adamw(others, settings)
        hidden = {"params": matrices, "lr": settings.lr, "weight_decay": settings.weight_decay, "momentum": MOMENTUM}
        super().__init__([hidden, *self._adamw.param_groups], {})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """Make one step from the gradients, those of `closure`'s value where it is given; returns that value."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        hidden, *others = self.param_groups
        for parameter in hidden["params"]:
            if parameter.grad is not None:
                self._step_matrix(parameter, hidden)
        # Loading a checkpoint replaces both, so AdamW is given them anew.
        self._adamw.param_groups, self._adamw.state = others, self.state
        self._adamw.step()
        return loss

    def _step_matrix(self, parameter: torch.Tensor, group: dict[str, Any]) -> None:
        gradient, momentum = parameter.grad, group["momentum"]
        assert gradient is not None
        state = self.state[parameter]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(gradient)
        state["momentum_buffer"].lerp_(gradient, 1 - momentum)
        update = gradient.lerp(state["momentum_buffer"], momentum)
        if isinstance(update, DTensor):
            whole_AB = orthogonalise(update.full_tensor())
            step = distribute_tensor(whole_AB, update.device_mesh, update.placements, src_data_rank=None)
        else:
            step = orthogonalise(update)
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        parameter.add_(step, alpha=-group["lr"] * 0.2 * math.sqrt(max(parameter.shape)))


def orthogonalise(matrix_AB: torch.Tensor) -> torch.Tensor:
    """The nearest matrix with singular values around 1, float [A, B]: five Newton-Schulz iterations in bfloat16."""
    a, b, c = NEWTON_SCHULZ
    tall = matrix_AB.shape[0] > matrix_AB.shape[1]
    x = matrix_AB.bfloat16()
    x = x.T if tall else x
    x = x / x.norm().clamp(min=NORM_FLOOR)
    for _ in range(NEWTON_SCHULZ_STEPS):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x.T if tall else x).to(matrix_AB.dtype).contiguous()


def make_schedule(
    optimizer: torch.optim.Optimizer, settings: OptimizerConfig, *, num_steps: int
) -> torch.optim.lr_scheduler.LambdaLR:
    """Linear warm-up, then constant, or linear or cosine down to `min_lr_ratio` of the rate at step `num_steps`."""

    def factor(step: int) -> float:
        if step < settings.warmup_steps:
            return (step + 1) / settings.warmup_steps
        if settings.schedule == "constant":
            return 1.0
        done = min(1.0, (step - settings.warmup_steps) / max(1, num_steps - settings.warmup_steps))
        left = 1 - done if settings.schedule == "linear" else 0.5 * (1 + math.cos(math.pi * done))
        return settings.min_lr_ratio + (1 - settings.min_lr_ratio) * left

    return torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
