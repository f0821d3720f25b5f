"""`[algorithm]`: advantage, loss and correction; `[reward]`: what they start from; `[critic]`: the values of `gae`."""

from typing import Literal

import msgspec

from molt.train.config.optimizer import OptimizerConfig
from molt.train.config.section import Section

CLIP_LOW, CLIP_HIGH = 0.2, 0.28

ESTIMATORS = (
    "reinforce",
    "reinforce_pp",
    "reinforce_pp_baseline",
    "group_mean",
    "grpo",
    "rloo",
    "batch_mean",
    "gae",
    "distillation",
)
"""The estimators that need no file of your own."""
GROUP_ESTIMATORS = ("group_mean", "grpo", "rloo", "reinforce_pp_baseline")
"""Those that compare the rollouts of a group."""

Preset = Literal[
    "", "grpo", "dapo", "dr_grpo", "rloo", "reinforce_pp", "flash_reinforce", "ppo", "gspo", "cispo", "distillation"
]
Correction = Literal["none", "tis", "icepop", "seq-mask-tis", "mis", "k3-gate", "flash", "decoupled-ppo", "custom"]


class AlgorithmConfig(Section, frozen=True, kw_only=True):
    """Advantage, loss and correction."""

    preset: Preset = ""
    """A published algorithm by name: sets the keys below that make it, each of which may still be given."""
    estimator: str = "grpo"
    """How rewards become advantages. `reinforce` takes the reward as it is, `reinforce_pp` whitens it over the window;
    `group_mean`, `grpo`, `rloo` and `reinforce_pp_baseline` compare the rollouts of a group, `batch_mean` all rollouts
    of the window, `gae` each token with the critic's value, `distillation` with a teacher. Or one of your own,
    `FILE.py:FUNCTION` or `module:FUNCTION`."""
    gamma: float = 1.0
    """Discount an action token (`reinforce`, `reinforce_pp`, `gae`)."""
    lam: float = 1.0
    """`gae`: weight of longer returns, an action token."""
    singleton: Literal["drop", "keep"] = "drop"
    """A group left with one rollout: `drop` it, or `keep` it with advantage 0. Of estimators that compare a group."""
    loss: Literal["ppo", "gspo", "cispo", "policy_gradient"] = "ppo"
    """The surrogate of each action token."""
    aggregation: Literal["token_mean", "sequence_mean", "constant", "prompt_mean"] = "token_mean"
    """From token losses to one number: mean over the window's action tokens; mean over rollouts of their token means;
    sum over `aggregation_length` and the number of rollouts; mean over prompts of their token means."""
    aggregation_length: int = 0
    """`constant`: tokens that a rollout's sum is divided by. 0: rollout.max_tokens."""
    updates_per_window: int = 1
    """Optimizer steps a window, on equal shares of its groups. Above 1 the policy departs from the one that the window
    started with, which is what the clip bounds."""
    clip_low: float = CLIP_LOW
    """`ppo`, `gspo`: the ratio of the current policy to that before the window is clipped below 1 - clip_low."""
    clip_high: float = CLIP_HIGH
    """`ppo`, `gspo`: above 1 + clip_high; `cispo`: above 1 + clip_high, and nothing below."""
    dual_clip: float = 0.0
    """`ppo`: where the advantage is negative, the loss of a token is at most this times -advantage. 0: unbounded."""
    correction: Correction = "tis"
    """Importance correction by rho, the probability before the update over the recorded one: a name for the seven
    keys below, `none`, or `custom`."""
    correction_level: Literal["", "token", "sequence", "geometric"] = ""
    """`token`: rho of each token; `sequence`: their product over the rollout; `geometric`: their geometric mean."""
    correction_mode: Literal["", "none", "truncate", "clip", "mask"] = ""
    """What is done outside the bounds: `truncate` above, `clip` on both sides, `mask` gives weight 0. `none`: no token
    is weighed, whatever its rho; the gate alone acts, if there is one."""
    correction_low: float | None = None
    """Lower bound of rho. None: the named correction's."""
    correction_high: float | None = None
    """Upper bound of rho. None: the named correction's."""
    gate: Literal["", "none", "geometric", "k3", "binary_kl"] = ""
    """Rollouts that are too far from the policy train nothing: by the geometric mean of rho, the mean k3, or the mean
    Bernoulli divergence of their tokens."""
    gate_low: float | None = None
    """Lower bound of the gate (`geometric`). None: the named correction's."""
    gate_high: float | None = None
    """Upper bound of the gate. None: the named correction's."""
    entropy_coef: float = 0.0
    """The mean entropy of the action tokens, times this, is taken from the loss."""
    kl_coef: float = 0.0
    """Weight of the divergence from the reference policy. 0: none, and no reference is loaded."""
    kl_placement: Literal["reward", "loss"] = "loss"
    """`reward`: k1 is taken from the reward of each token, before advantages; `loss`: k2, importance-weighted."""
    kl_target: float = 0.0
    """Above 0: kl_coef adapts, so that the mean divergence comes to this (nats a token)."""
    kl_horizon: int = 10_000
    """Rollouts over which kl_coef adapts."""
    reference_path: str = ""
    """The frozen policy that kl_coef holds on to. Empty: model.path."""
    teacher_path: str = ""
    """`distillation`: the policy to be learned from, of the same tokenizer."""
    distillation_coef: float = 1.0
    """`distillation`: scale of the advantage."""


class CorrectionRule(msgspec.Struct, frozen=True, kw_only=True):
    """A correction with nothing left to look up: see `correction_rule`."""

    level: Literal["token", "sequence", "geometric"] = "token"
    mode: Literal["none", "truncate", "clip", "mask"] = "none"
    """`none`: every token weighs 1."""
    low: float = 0.0
    high: float = float("inf")
    gate: Literal["none", "geometric", "k3", "binary_kl"] = "none"
    gate_low: float = 0.0
    gate_high: float = float("inf")

    @property
    def needs_rollout(self) -> bool:
        """Whether a weight depends on the whole rollout, so that all of it is read before anything is weighed."""
        return self.gate != "none" or (self.mode != "none" and self.level != "token")


class RewardConfig(Section, frozen=True, kw_only=True):
    """What is done to a rollout's reward before advantages."""

    clip_low: float | None = None
    """Rewards below count as this. None: no bound."""
    clip_high: float | None = None
    """Rewards above count as this. None: no bound."""
    overlong_length: int = 0
    """Action tokens of a rollout's longest segment above which the full penalty of 1 is taken off
    (arXiv:2503.14476). 0: no penalty."""
    overlong_ramp: int = 0
    """Tokens before overlong_length over which the penalty rises from 0."""
    truncated: Literal["keep", "zero"] = "keep"
    """Rollouts with outcome `truncated`: keep their reward, or count them as reward 0. `pool.on_truncated` can leave
    them out."""


class CriticConfig(Section, frozen=True, kw_only=True):
    """The value model of algorithm.estimator `gae`."""

    path: str = ""
    """Its trunk's checkpoint. Empty: model.path."""
    placement: Literal["colocated", "own"] = "colocated"
    """`colocated`: in the actor's ranks; `own`: ranks of its own, as many as the actor has."""
    warmup_updates: int = 0
    """First updates in which only the critic learns."""
    value_clip: float = 0.0
    """A value may move this far from the one before the window without its loss being bounded. 0: no clip."""
    optimizer: OptimizerConfig = OptimizerConfig(lr=1e-5)


def is_custom(estimator: str) -> bool:
    """Whether `algorithm.estimator` names a function of the user's."""
    return ":" in estimator


def compares_groups(estimator: str, *, group_size: int) -> bool:
    """Whether rollouts of a group are compared, so that one alone teaches nothing.

    Of the user's own functions nothing is known: where there are groups, they are taken to be compared.
    """
    return estimator in GROUP_ESTIMATORS or (is_custom(estimator) and group_size > 1)
