"""Golden values of other people's programs, for the tests in packages/molt-train/tests/golden. Not run in CI.

    python scripts/golden.py verl|torchrl|liger packages/molt-train/tests/golden

writes FOLDER/NAME.json: for each case the inputs, what the program made of them, and the versions that made it. The
three cannot share an environment, nor live in ours; each gets a throw-away one that borrows the torch of the checkout's
environment, as every package here is pure Python but tensordict. From the root of the checkout:

    folder=$(mktemp -d)
    for name in verl torchrl liger; do
      uv venv --python 3.11 "$folder/$name"
      realpath .venv/lib/python3.11/site-packages > "$folder/$name/lib/python3.11/site-packages/zz_borrowed.pth"
    done
    VIRTUAL_ENV="$folder/verl" uv pip install --no-deps verl==0.9.1 tensordict==0.10.0 omegaconf hydra-core codetiming \
      dill pandas antlr4-python3-runtime==4.9.3 pyvers python-dateutil pytz tzdata orjson
    VIRTUAL_ENV="$folder/torchrl" uv pip install --no-deps torchrl==0.14.1 "tensordict>=0.14.3" pyvers
    VIRTUAL_ENV="$folder/liger" uv pip install --no-deps liger-kernel==0.8.5
    for name in verl torchrl liger; do
      CUDA_VISIBLE_DEVICES= "$folder/$name/bin/python" scripts/golden.py $name packages/molt-train/tests/golden
    done
    rm -r "$folder"
"""

# Shapes: B rows, T tokens of the longest row, V vocabulary, H hidden. Masks are 1 at action tokens.

import argparse
import importlib
import json
import random
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch

Case = dict[str, Any]
Matrix = list[list[float]]

# Two tool calls in the first row, one in the second, a short row, a row without a gap.
MASK = [[1, 1, 0, 1, 0, 0, 1], [0, 1, 1, 0, 1, 1, 0], [1, 1, 0, 0, 0, 0, 0], [1, 1, 1, 1, 1, 1, 1]]
GROUPS = {
    "one outcome a group differs": ([1.0, 0.0, 0.0, 0.0], [0, 0, 0, 0]),
    "two groups, mixed rewards": ([0.5, -1.25, 2.0, 0.3], [0, 0, 1, 1]),
    "two interleaved groups": ([0.25, 3.0, 0.75, -1.0], [7, 4, 7, 4]),
}


def numbers(seed: int, low: float, high: float) -> Matrix:
    """One number for each slot of `MASK`, of few digits, so that they are the same in every file."""
    rng = random.Random(seed)
    return [[round(rng.uniform(low, high), 4) for _ in row] for row in MASK]


def tensor(values: Any) -> torch.Tensor:
    """In float64: a golden value should be the formula's, not the rounding's."""
    return torch.tensor(values, dtype=torch.float64)


def actions(matrix: torch.Tensor | None) -> list[float]:
    """The slots of `MASK` that are actions, row by row."""
    assert matrix is not None, "no gradient came back"
    return matrix[tensor(MASK) > 0].tolist()


def from_verl() -> Iterator[Case]:
    """Advantages, policy losses with their gradients, the value loss and divergences of verl."""
    algos = importlib.import_module("verl.trainer.ppo.core_algos")
    yield from _verl_advantages(algos)
    yield from _verl_policy_losses(algos)
    old, new, returns = numbers(1, -1, 1), numbers(2, -1, 1), numbers(3, -1, 1)
    for clip in (0.2, 0.5):
        values = tensor(new).requires_grad_()
        loss, clipped = algos.compute_value_loss(values, tensor(returns), tensor(old), tensor(MASK), clip)
        loss.backward()
        inputs = {"values": new, "old_values": old, "returns": returns, "clip": clip}
        result = {"loss": loss.item(), "clip_fraction": float(clipped), "gradient": actions(values.grad)}
        yield {"kind": "value_loss", **inputs, **result}
    policy, reference = numbers(4, -3, 0), numbers(5, -3, 0)
    for name in ("k1", "k2", "k3"):
        result = algos.kl_penalty_forward(tensor(policy), tensor(reference), name)
        yield {"kind": "divergence", "name": name, "policy": policy, "reference": reference, "result": actions(result)}


def _verl_advantages(algos: Any) -> Iterator[Case]:
    mask = tensor(MASK)
    last = [max(i for i, m in enumerate(row) if m) for row in MASK]

    def token_rewards(rewards: list[float]) -> torch.Tensor:
        placed = torch.zeros_like(mask)
        for row, (slot, reward) in enumerate(zip(last, rewards, strict=True)):
            placed[row, slot] = reward
        return placed

    outcome: dict[str, Callable[..., Any]] = {
        "grpo": algos.compute_grpo_outcome_advantage,
        "group_mean": lambda *a, **k: algos.compute_grpo_outcome_advantage(*a, norm_adv_by_std_in_grpo=False, **k),
        "rloo": algos.compute_rloo_outcome_advantage,
        "reinforce_pp_baseline": algos.compute_reinforce_plus_plus_baseline_outcome_advantage,
    }
    for what, (rewards, groups) in GROUPS.items():
        common = {"kind": "advantage", "what": what, "rewards": rewards, "groups": groups}
        for name, estimator in outcome.items():
            advantages, _ = estimator(token_rewards(rewards), mask, index=np.array(groups))
            yield {**common, "estimator": name, "advantages": actions(advantages)}
        for gamma in (1.0, 0.9, 0.5):
            config = algos.AlgoConfig(gamma=gamma)
            advantages, returns = algos.compute_reinforce_plus_plus_outcome_advantage(
                token_rewards(rewards), mask, config=config
            )
            result = {"advantages": actions(advantages), "returns": actions(returns)}
            yield {**common, "estimator": "reinforce_pp", "gamma": gamma, **result}
    values = numbers(6, -1, 1)
    for gamma, lam in ((1.0, 1.0), (0.9, 0.8), (0.5, 0.95), (1.0, 0.0)):
        rewards = GROUPS["two groups, mixed rewards"][0]
        advantages, returns = algos.compute_gae_advantage_return(
            token_rewards(rewards), tensor(values), mask, gamma, lam
        )
        inputs = {"rewards": rewards, "values": values, "gamma": gamma, "lam": lam}
        yield {
            "kind": "advantage",
            "estimator": "gae",
            **inputs,
            "advantages": actions(advantages),
            "returns": actions(returns),
        }


NO_DUAL_CLIP = 1e9  # verl always has one
AGGREGATIONS = {
    "token_mean": "token-mean",
    "sequence_mean": "seq-mean-token-mean",
    "constant": "seq-mean-token-sum-norm",
}
LENGTH = 20


def _verl_policy_losses(algos: Any) -> Iterator[Case]:
    actor_config = importlib.import_module("verl.workers.config").ActorConfig
    losses = {
        "ppo": algos.compute_policy_loss_vanilla,
        "gspo": algos.compute_policy_loss_gspo,
        "cispo": algos.compute_policy_loss_cispo,
    }
    # Ratios from about 0.3 to 3, so that every branch of every clip is taken.
    current, old = numbers(7, -2, -0.5), numbers(8, -2, -0.5)
    advantages, correction = numbers(9, -1.5, 1.5), numbers(10, 0, 2)
    settings = [
        ("ppo", 0.2, 0.28, 0.0),
        ("ppo", 0.2, 0.2, 1.5),
        ("gspo", 3e-4, 4e-4, 0.0),
        ("gspo", 0.05, 0.2, 0.0),
        ("cispo", 1.0, 0.28, 0.0),  # 1 - 1: no bound below, as published
    ]
    for (name, low, high, dual), (ours, theirs) in [(s, a) for s in settings for a in AGGREGATIONS.items()]:
        config = actor_config(
            strategy="fsdp",
            rollout_n=1,
            ppo_micro_batch_size_per_gpu=1,
            clip_ratio_low=low,
            clip_ratio_high=high,
            clip_ratio_c=dual or NO_DUAL_CLIP,
            global_batch_info={"loss_scale_factor": LENGTH},
        )
        logprobs = tensor(current).requires_grad_()
        loss, metrics = losses[name](
            tensor(old), logprobs, tensor(advantages), tensor(MASK), theirs, config, tensor(correction)
        )
        loss.backward()
        inputs = {"current": current, "old": old, "advantages": advantages, "correction": correction}
        settings_of = {"clip_low": low, "clip_high": high, "dual_clip": dual, "aggregation": ours}
        result = {"loss": loss.item(), "gradient": actions(logprobs.grad)}
        fraction = metrics["actor/pg_clipfrac"]
        yield {"kind": "policy_loss", "loss_name": name, **settings_of, **inputs, **result, "clip_fraction": fraction}


def from_torchrl() -> Iterator[Case]:
    """Generalized advantages and discounted returns of TorchRL, which knows no gaps: its rows hold actions only."""
    functional = importlib.import_module("torchrl.objectives.value.functional")
    rng = random.Random(11)
    for num_actions, gamma, lam in ((5, 0.9, 0.8), (1, 0.9, 0.8), (12, 0.99, 0.95), (12, 1.0, 0.5), (9, 0.5, 0.0)):
        values = [round(rng.uniform(-1, 1), 4) for _ in range(num_actions)]
        rewards = [0.0] * (num_actions - 1) + [round(rng.uniform(-2, 2), 4)]
        done = torch.zeros(num_actions, 1, dtype=torch.bool)
        done[-1] = True
        reward = tensor(rewards).unsqueeze(-1)
        advantages, targets = functional.generalized_advantage_estimate(
            tensor(gamma), lam, tensor(values).unsqueeze(-1), tensor([*values[1:], 0.0]).unsqueeze(-1), reward, done
        )
        yield {
            "values": values,
            "reward": rewards[-1],
            "gamma": gamma,
            "lam": lam,
            "advantages": advantages.flatten().tolist(),
            "value_targets": targets.flatten().tolist(),
            "returns": functional.reward2go(reward, done, gamma).flatten().tolist(),
        }


def from_liger() -> Iterator[Case]:
    """Losses of Liger's fused head, from hidden states to the gradients of these and of the head."""
    loss_class = importlib.import_module("liger_kernel.chunked_loss").LigerFusedLinearGRPOLoss
    rng = random.Random(12)
    num_rows, num_tokens, hidden_size, vocabulary = len(MASK), len(MASK[0]), 4, 11

    def draw(*shape: int, scale: float) -> Any:
        if len(shape) == 1:
            return [round(rng.uniform(-scale, scale), 4) for _ in range(shape[0])]
        return [draw(*shape[1:], scale=scale) for _ in range(shape[0])]

    inputs: Case = {
        "hidden": draw(num_rows, num_tokens, hidden_size, scale=1.0),
        "weight": draw(vocabulary, hidden_size, scale=1.0),
        "tokens": [[rng.randrange(vocabulary) for _ in range(num_tokens)] for _ in range(num_rows)],
        "advantages": draw(num_rows, scale=1.5),
        "correction": [[round(rng.uniform(0, 2), 4) for _ in range(num_tokens)] for _ in range(num_rows)],
    }
    shift = draw(num_rows, num_tokens, scale=0.6)
    cases = [
        ("ppo", "dapo", "token", "token_mean", 1.0),
        ("ppo", "grpo", "token", "sequence_mean", 0.7),
        ("ppo", "dr_grpo", "token", "constant", 1.0),
        ("gspo", "grpo", "sequence", "sequence_mean", 1.0),
        ("cispo", "cispo", "token", "token_mean", 1.3),
    ]
    for loss_name, loss_type, level, aggregation, temperature in cases:
        hidden = torch.tensor(inputs["hidden"]).requires_grad_()
        weight = torch.tensor(inputs["weight"]).requires_grad_()
        tokens = torch.tensor(inputs["tokens"])
        with torch.no_grad():
            current = ((hidden @ weight.T) / temperature).log_softmax(-1).gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
        old = (current + torch.tensor(shift)).tolist()
        correction = inputs["correction"]
        if level == "sequence":
            # Its ratio is differentiated through the mean, which spreads a token's weight over the row. Ours are the
            # token form, which is the same where the weight is one of the whole row.
            correction = [[row[0]] * num_tokens for row in correction]
        fused = loss_class(
            beta=0.0,
            compiled=False,
            use_ref_model=False,
            epsilon_low=0.2,
            epsilon_high=1.28 if loss_type == "cispo" else 0.28,  # there it is the ceiling itself
            loss_type=loss_type,
            importance_sampling_level=level,
            max_completion_length=LENGTH,
            temperature=temperature,
        )
        loss, _ = fused(
            hidden,
            weight,
            tokens,
            torch.tensor(MASK, dtype=torch.float32),
            torch.tensor(inputs["advantages"]),
            old_per_token_logps=torch.tensor(old),
            vllm_is_ratio=torch.tensor(correction),
        )
        loss.backward()
        assert hidden.grad is not None
        assert weight.grad is not None
        settings = {"loss_name": loss_name, "aggregation": aggregation, "temperature": temperature, "old": old}
        gradients = {"hidden_gradient": hidden.grad.tolist(), "weight_gradient": weight.grad.tolist()}
        yield {**inputs, **settings, "correction": correction, "loss": loss.item(), **gradients}


PROGRAMS = {
    "verl": ("verl", from_verl),
    "torchrl": ("torchrl", from_torchrl),
    "liger": ("liger-kernel", from_liger),
}


def main() -> None:
    """Write the values of one program."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=PROGRAMS)
    parser.add_argument("folder", type=Path)
    arguments = parser.parse_args()
    package, cases = PROGRAMS[arguments.name]
    versions = {name: version(name) for name in (package, "torch")}
    shared = {"mask": MASK, "length": LENGTH, "clip_low": 0.2, "clip_high": 0.28}
    head = json.dumps({"versions": versions, **shared})
    lines = ",\n".join(json.dumps(case) for case in cases())
    (arguments.folder / f"{arguments.name}.json").write_text(f'{head[:-1]},\n"cases": [\n{lines}\n]}}\n')


if __name__ == "__main__":
    main()
