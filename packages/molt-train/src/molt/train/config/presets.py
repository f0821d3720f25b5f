"""Named corrections and published algorithms, as the keys that make them."""

from typing import Any

from molt.train.config.algorithm import AlgorithmConfig, CorrectionRule

CORRECTIONS = {
    "none": CorrectionRule(),
    # Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy RL training".
    "tis": CorrectionRule(mode="truncate", high=2.0),
    # Ring-1T, arXiv:2510.18855.
    "icepop": CorrectionRule(mode="mask", low=0.5, high=5.0),
    "seq-mask-tis": CorrectionRule(mode="truncate", high=2.0, gate="geometric", gate_low=0.99, gate_high=1.01),
    # Liu et al. 2025, "When speed kills stability"; arXiv:2512.23075.
    "mis": CorrectionRule(level="sequence", mode="mask", high=2.0),
    "k3-gate": CorrectionRule(mode="truncate", high=2.0, gate="k3", gate_high=0.01),
    # FlashREINFORCE: the gate bounds the ratios, nothing cuts them.
    "flash": CorrectionRule(mode="truncate", gate="binary_kl", gate_high=3e-3),
    # arXiv:2110.00641; the cap is that of AReaL, arXiv:2505.24298.
    "decoupled-ppo": CorrectionRule(mode="truncate", high=5.0),
    "custom": CorrectionRule(),
}
"""What each `algorithm.correction` stands for where the other correction keys are left out."""

PRESETS: dict[str, dict[str, dict[str, Any]]] = {
    # arXiv:2402.03300. One optimizer step a window, so the clip acts only where more are asked for.
    "grpo": {"algorithm": {"estimator": "grpo", "loss": "ppo", "clip_high": 0.2, "aggregation": "sequence_mean"}},
    # arXiv:2503.14476.
    "dapo": {
        "algorithm": {
            "estimator": "grpo",
            "loss": "ppo",
            "clip_low": 0.2,
            "clip_high": 0.28,
            "aggregation": "token_mean",
            "updates_per_window": 4,
        },
        "train": {"drop_degenerate": True},
    },
    # arXiv:2503.20783.
    "dr_grpo": {"algorithm": {"estimator": "group_mean", "loss": "ppo", "clip_high": 0.2, "aggregation": "constant"}},
    # arXiv:2402.14740: the completion is one action, so its log-prob is a sum over tokens.
    "rloo": {
        "algorithm": {
            "estimator": "rloo",
            "loss": "policy_gradient",
            "aggregation": "constant",
            "kl_placement": "reward",
        }
    },
    # arXiv:2501.03262.
    "reinforce_pp": {
        "algorithm": {
            "estimator": "reinforce_pp",
            "loss": "ppo",
            "clip_high": 0.2,
            "aggregation": "token_mean",
            "kl_placement": "reward",
        }
    },
    # github.com/yifanzhang-pro/FlashREINFORCE; one sample a prompt and 128 prompts as in the run of Molt's paper.
    "flash_reinforce": {
        "algorithm": {
            "estimator": "batch_mean",
            "loss": "policy_gradient",
            "aggregation": "sequence_mean",
            "correction": "flash",
        },
        "rollout": {"group_size": 1},
        "train": {"groups_per_update": 128},
    },
    # arXiv:1707.06347, arXiv:1506.02438.
    "ppo": {
        "algorithm": {
            "estimator": "gae",
            "lam": 0.95,
            "loss": "ppo",
            "clip_high": 0.2,
            "aggregation": "token_mean",
            "updates_per_window": 4,
            "kl_placement": "reward",
        },
        "critic": {"value_clip": 0.2},
    },
    # arXiv:2507.18071: its clip range, and its four minibatches a batch.
    "gspo": {
        "algorithm": {
            "estimator": "grpo",
            "loss": "gspo",
            "clip_low": 3e-4,
            "clip_high": 4e-4,
            "aggregation": "sequence_mean",
            "updates_per_window": 4,
        }
    },
    # arXiv:2506.13585, which publishes no bound; that of arXiv:2510.13786, a ratio of 5.
    "cispo": {
        "algorithm": {
            "estimator": "grpo",
            "loss": "cispo",
            "clip_high": 4.0,
            "aggregation": "token_mean",
            "updates_per_window": 4,
        }
    },
    # arXiv:2306.13649, with the sampled tokens alone.
    "distillation": {
        "algorithm": {"estimator": "distillation", "loss": "policy_gradient", "aggregation": "token_mean"}
    },
}
"""By `algorithm.preset`, the keys that it sets, a table each. None sets a key whose default is None: TOML could not say
that a user wants the default back."""


def expand_preset(table: dict[str, Any]) -> None:
    """Add to a configuration's tables the keys of its `algorithm.preset`, where the user gave none.

    A name of no preset is left for the conversion to refuse.
    """
    algorithm: dict[str, Any] = table.get("algorithm", {})
    for section, keys in PRESETS.get(str(algorithm.get("preset")), {}).items():
        table[section] = keys | table.get(section, {})


def correction_rule(algorithm: AlgorithmConfig) -> CorrectionRule:
    """The correction of rollouts by their recorded log-probs, with the keys that are given in place of the name's own.

    Bounds of another gate than the name's are not taken over, since they are on another scale.
    """
    named = CORRECTIONS[algorithm.correction]
    gate = algorithm.gate or named.gate
    gate_low, gate_high = (named.gate_low, named.gate_high) if gate == named.gate else (0.0, float("inf"))
    return CorrectionRule(
        level=algorithm.correction_level or named.level,
        mode=algorithm.correction_mode or named.mode,
        low=named.low if algorithm.correction_low is None else algorithm.correction_low,
        high=named.high if algorithm.correction_high is None else algorithm.correction_high,
        gate=gate,
        gate_low=gate_low if algorithm.gate_low is None else algorithm.gate_low,
        gate_high=gate_high if algorithm.gate_high is None else algorithm.gate_high,
    )
