"""A small policy, the groups of a window on it, and the gradient of their loss by an independent float64 oracle."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from molt.train.config import AlgorithmConfig
from molt.train.records.experience import Experience, Payload, PayloadStore
from molt.train.records.rollout import Group, Outcome, Rollout
from molt.train.records.window import Scores, TrainWindow
from molt.train.window import WindowPlan, attach, build_rows, lay_out

NUM_TOKENS = 29
TEMPERATURE = 0.7
GROUPS = (((14, 9), (21,)), ((18,), (7, 24, 12)), ((25,), (11,)))
"""Tokens of each segment of each rollout of each group."""
REJECTED, ADMITTED = 0, 3
"""Rollouts whose first segments alone the `flash` gate would judge the other way."""
NEAR = 0.02
"""How far recorded log-probs are off, at most."""
FAR = {(REJECTED, 1): 2.0, (ADMITTED, 0): 0.75}
"""How far they are off in these segments."""
GATE = 3e-3
"""Of `flash`."""


@dataclass(frozen=True)
class Segment:
    token_ids: np.ndarray
    is_action: np.ndarray
    behaviour: np.ndarray


def save_policy(folder: Path, *, tied: bool) -> Path:
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=NUM_TOKENS,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        tie_word_embeddings=tied,
        initializer_range=0.2,  # logits that differ, and gradients that are not almost 0
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    return folder


class Oracle:
    """Row by row, token by token, on Hugging Face's own class and all of its logits."""

    def __init__(self, folder: Path):
        import torch
        from transformers import Qwen3ForCausalLM

        self._model = Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float64, attn_implementation="eager")

    def log_softmax(self, token_ids: np.ndarray) -> Any:
        """[T, V] of the token after each."""
        import torch

        logits = self._model(input_ids=torch.from_numpy(token_ids.astype(np.int64))[None]).logits
        return (logits[0] / TEMPERATURE).log_softmax(-1)

    def gradients(
        self, rollouts: Sequence[Sequence[Segment]], advantages: np.ndarray, algorithm: AlgorithmConfig
    ) -> dict[str, np.ndarray]:
        """Of the window's loss, at the weights that recomputed the old log-probs, by the names of the weights."""
        self._model.zero_grad()
        advantages = iter(advantages.tolist())
        counts = [sum(int(segment.is_action.sum()) for segment in segments) for segments in rollouts]
        for count, segments in zip(counts, rollouts, strict=True):
            weight = 1 / sum(counts) if algorithm.aggregation == "token_mean" else 1 / (len(counts) * count)
            is_admitted = self.divergence(segments) <= GATE
            for segment in segments:
                log_softmax, loss = self.log_softmax(segment.token_ids), 0.0
                for t in np.flatnonzero(segment.is_action).tolist():
                    logprob = log_softmax[t - 1, segment.token_ids[t]]
                    entropy = -sum(value.exp() * value for value in log_softmax[t - 1])
                    rho = np.exp(logprob.item() - float(segment.behaviour[t]))
                    correction = {"tis": min(rho, 1.01), "none": 1.0, "flash": rho * is_admitted}[algorithm.correction]
                    loss -= weight * (correction * next(advantages) * logprob + algorithm.entropy_coef * entropy)
                loss.backward()
        return {name: weight.grad.numpy().copy() for name, weight in self._model.named_parameters()}

    def divergence(self, segments: Sequence[Segment]) -> float:
        """Mean Bernoulli divergence of the action tokens."""
        found = []
        for segment in segments:
            log_softmax = self.log_softmax(segment.token_ids).detach()
            for t in np.flatnonzero(segment.is_action).tolist():
                p, q = np.exp(segment.behaviour[t]), log_softmax[t - 1, segment.token_ids[t]].exp().item()
                found.append(p * np.log(p / q) + (1 - p) * np.log((1 - p) / (1 - q)))
        return float(np.mean(found))


def make_rollouts(oracle: Oracle) -> list[list[Segment]]:
    """The segments of each rollout of `GROUPS`; recorded log-probs are near those of the policy, or some far off."""
    draw = np.random.default_rng(0)
    rollouts = []
    for number, lengths in enumerate(itertools.chain(*GROUPS)):
        segments = []
        for place, length in enumerate(lengths):
            token_ids = draw.integers(0, NUM_TOKENS, length).astype(np.int32)
            is_action = draw.random(length) < 0.5
            is_action[0], is_action[-1] = False, True
            table = oracle.log_softmax(token_ids).detach().numpy()
            logprobs = np.append(0.0, table[np.arange(length - 1), token_ids[1:]])
            off = draw.uniform(-NEAR, NEAR, length)
            off[:] = FAR.get((number, place), off)
            behaviour = np.where(is_action, np.minimum(logprobs + off, -0.01), 0.0).astype(np.float32)
            segments.append(Segment(token_ids, is_action, behaviour))
        rollouts.append(segments)
    return rollouts


def make_groups(rollouts: Sequence[Sequence[Segment]], store: PayloadStore) -> list[Group]:
    """The rollouts as the groups of a window."""
    numbered = iter(enumerate(rollouts))
    return [
        Group(
            group_id=str(group),
            task_id=str(group),
            rollouts=tuple(
                _make_rollout(segments, store, number=number, group=group)
                for number, segments in itertools.islice(numbered, len(members))
            ),
        )
        for group, members in enumerate(GROUPS)
    ]


def _make_rollout(segments: Sequence[Segment], store: PayloadStore, *, number: int, group: int) -> Rollout:
    experiences = [
        Experience(
            segment_id=f"{number}/{place}",
            rollout_id=str(number),
            group_id=str(group),
            num_tokens=len(segment.token_ids),
            num_actions=int(segment.is_action.sum()),
            oldest_version=0,
            newest_version=0,
            mean_version=0.0,
            payload=store.put(
                Payload(
                    token_ids=segment.token_ids,
                    action_mask=segment.is_action,
                    logprobs=segment.behaviour,
                    versions=np.where(segment.is_action, 0, -1).astype(np.int32),
                )
            ),
        )
        for place, segment in enumerate(segments)
    ]
    return Rollout(
        rollout_id=str(number),
        group_id=str(group),
        attempt=1,
        outcome=Outcome(kind="completed", reward=0.0),
        experiences=tuple(experiences),
    )


def only_rollout(groups: Sequence[Group], number: int) -> list[Group]:
    """The window of a single rollout."""
    group = next(group for group in groups if any(r.rollout_id == str(number) for r in group.rollouts))
    rollouts = tuple(r for r in group.rollouts if r.rollout_id == str(number))
    return [msgspec.structs.replace(group, rollouts=rollouts)]


def num_actions(groups: Sequence[Group]) -> int:
    return sum(e.num_actions for group in groups for rollout in group.rollouts for e in rollout.experiences)


def make_windows(
    groups: Sequence[Group],
    plan: WindowPlan,
    advantages: np.ndarray,
    *,
    returns: np.ndarray | None = None,
    scores: Sequence[Scores] | None = None,
    step: int = 1,
) -> list[TrainWindow]:
    """The optimizer steps of one update."""
    rows = attach(build_rows(groups, plan), advantages, returns_N=returns, scores=scores)
    return lay_out(rows, plan, step=step, policy_version=step - 1)
