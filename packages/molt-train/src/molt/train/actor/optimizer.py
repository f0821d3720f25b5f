"""AdamW and its learning-rate schedule."""

import math

import torch

from molt.train.config import OptimizerConfig


def make_optimizer(model: torch.nn.Module, settings: OptimizerConfig) -> torch.optim.AdamW:
    """AdamW over every trainable parameter; norms and biases are not decayed."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": settings.weight_decay},
        {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=settings.lr,
        betas=(settings.beta1, settings.beta2),
        eps=settings.eps,
    )


def make_schedule(
    optimizer: torch.optim.Optimizer, settings: OptimizerConfig, *, num_steps: int
) -> torch.optim.lr_scheduler.LambdaLR:
    """Linear warm-up, then constant or cosine down to `min_lr_ratio` of the rate at step `num_steps`."""

    def factor(step: int) -> float:
        if step < settings.warmup_steps:
            return (step + 1) / settings.warmup_steps
        if settings.schedule == "constant":
            return 1.0
        done = min(1.0, (step - settings.warmup_steps) / max(1, num_steps - settings.warmup_steps))
        return settings.min_lr_ratio + (1 - settings.min_lr_ratio) * 0.5 * (1 + math.cos(math.pi * done))

    return torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
