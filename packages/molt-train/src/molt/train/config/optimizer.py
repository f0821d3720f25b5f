"""`[*.optimizer]`: how weights move."""

from typing import Literal

from molt.train.config.section import Section


class OptimizerConfig(Section, frozen=True, kw_only=True):
    """The optimizer and its schedule."""

    name: Literal["adamw", "muon"] = "adamw"
    """`muon`: Muon for weight matrices, AdamW for embeddings, head, norms and biases."""
    lr: float = 1e-6
    """Peak learning rate."""
    beta1: float = 0.9
    """Decay of AdamW's mean of the gradients."""
    beta2: float = 0.95
    """Decay of its mean of their squares."""
    eps: float = 1e-8
    """Added to the denominator of AdamW's step."""
    weight_decay: float = 0.0
    """Of weight matrices; norms and biases are not decayed."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Of the learning rate after the warm-up."""
    warmup_steps: int = 0
    """Optimizer steps over which the rate rises linearly to lr."""
    min_lr_ratio: float = 0.0
    """Where `linear` and `cosine` end, as a fraction of lr."""
    max_grad_norm: float = 1.0
    """The gradient is scaled down to this norm."""
