"""The update does not depend on how a window is cut: into ranks, microbatches, or the segments of a rollout.

A toy policy whose logits are a linear function of everything before the token, trained through the real path: turn
tree, trajectory, payload, window, loss, denominator. The oracle is the closed form of its gradient, in plain loops.
"""

import math
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from molt.train.advantage import compute_advantages
from molt.train.config import AlgorithmConfig
from molt.train.experience import make_experience, to_payload
from molt.train.loss import gather_logprobs, policy_loss, window_token_mean
from molt.train.records.rollout import Group, Outcome, Rollout
from molt.train.records.turn import Turn
from molt.train.trajectory import build_trajectory
from molt.train.window import build_window

V = 5
SETTINGS = AlgorithmConfig(correction="tis", correction_high=1.1)
GRPO = partial(compute_advantages, "grpo", gamma=1.0)
WEIGHTS = torch.randn(V, V, generator=torch.Generator().manual_seed(1), dtype=torch.float64) * 0.5
ROUNDING = 1e-10


def turn(turn_id, parent, context_ids, token_ids, logprobs, **changes):
    prompt_length = len(context_ids)
    if parent is not None:
        prompt_length += parent.prompt_length + len(parent.token_ids)
    fields = {
        "turn_id": turn_id,
        "session_id": "s",
        "wire": "chat",
        "parent_turn_id": parent.turn_id if parent else None,
        "opened_by": None if parent else "start",
        "response_id": turn_id,
        "status": "delivered",
        "adopted": True,
        "auxiliary": False,
        "finish_reason": "stop",
        "prompt_length": prompt_length,
        "context_ids": context_ids,
        "token_ids": token_ids,
        "logprobs": logprobs,
        "versions": [0] * len(token_ids),
    }
    return Turn(**(fields | changes))


def random_session(generator, name, num_turns):
    """A linear session: tool text between sampled tokens, behaviour log-probs off by up to 30 %."""
    turns = []
    for i in range(num_turns):
        context, sampled = (generator.integers(0, V, generator.integers(1, 4)).tolist() for _ in range(2))
        noise = generator.uniform(-0.3, 0.3, len(sampled)) - 1.6
        turns.append(turn(f"{name}-{i}", turns[-1] if turns else None, context, sampled, noise.tolist()))
    return turns


def rollout_of(turns, name, group_id, reward):
    segments = [s for s in build_trajectory(name, turns).segments if s.trained]
    experiences = tuple(
        make_experience(s, rollout_id=name, group_id=group_id, payload_ref=to_payload(s)) for s in segments
    )
    outcome = Outcome(kind="completed", reward=reward)
    return Rollout(rollout_id=name, group_id=group_id, attempt=1, outcome=outcome, experiences=experiences)


def random_sessions(seed=0, num_groups=4, group_size=3):
    generator = np.random.default_rng(seed)
    return [
        (f"g{g}", f"g{g}r{r}", random_session(generator, f"g{g}r{r}", int(generator.integers(1, 5))), float(r == g % 3))
        for g in range(num_groups)
        for r in range(group_size)
    ]


def groups_of(sessions):
    by_group: dict[str, list[Rollout]] = {}
    for group_id, name, turns, reward in sessions:
        by_group.setdefault(group_id, []).append(rollout_of(turns, name, group_id, reward))
    return [Group(group_id=g, task_id=g, rollouts=tuple(members)) for g, members in by_group.items()]


def features(prefix):
    """Discounted counts of the tokens before a position, so that every one of them matters."""
    out = [0.0] * V
    for distance, token in enumerate(reversed(prefix)):
        out[token] += 0.8**distance
    return out


def microbatch_loss(weights, microbatch, window, num_ranks):
    inputs, targets, behaviour, advantages = [], [], [], []
    for row in microbatch.rows:
        payload = row.experience.payload
        tokens = payload.token_ids.tolist()
        for position in np.flatnonzero(payload.action_mask):
            inputs.append(features(tokens[:position]))
            targets.append(tokens[position])
            behaviour.append(float(payload.logprobs[position]))
        advantages += row.advantages.tolist()
    inputs_NV = torch.tensor(inputs, dtype=torch.float64).reshape(-1, V)
    current = gather_logprobs(inputs_NV @ weights.T, torch.tensor(targets, dtype=torch.int64), 1.0)
    loss, _ = policy_loss(
        current,
        current.detach(),
        torch.tensor(behaviour, dtype=torch.float64),
        torch.tensor(advantages, dtype=torch.float64),
        settings=SETTINGS,
    )
    return window_token_mean(loss, num_action_tokens=window.num_action_tokens, dp_size=num_ranks)


def window_gradient(groups, num_ranks=1, microbatch_tokens=10**6, advantages=GRPO):
    (window,) = build_window(
        groups,
        step=1,
        policy_version=0,
        num_ranks=num_ranks,
        microbatch_tokens=microbatch_tokens,
        advantages=advantages,
    )
    per_rank = []
    for microbatches in window.ranks:
        weights = WEIGHTS.clone().requires_grad_()
        for microbatch in microbatches:
            microbatch_loss(weights, microbatch, window, num_ranks).backward()
        per_rank.append(torch.zeros_like(weights) if weights.grad is None else weights.grad)
    return torch.stack(per_rank).mean(0)  # what FSDP does with the ranks' gradients


def closed_form(sessions):
    """-1/N sum of w A (onehot - softmax) x features, straight from the sessions, without trajectory or window."""
    by_group: dict[str, list[float]] = {}
    for group_id, _, _, reward in sessions:
        by_group.setdefault(group_id, []).append(reward)
    gradient = [[0.0] * V for _ in range(V)]
    num_tokens = 0
    for group_id, _, turns, reward in sessions:
        rewards = by_group[group_id]
        mean = sum(rewards) / len(rewards)
        std = math.sqrt(sum((r - mean) ** 2 for r in rewards) / (len(rewards) - 1))
        advantage = (reward - mean) / (std + 1e-6)
        row: list[int] = []
        for t in turns:
            row += t.context_ids
            for token, recorded in zip(t.token_ids, t.logprobs, strict=True):
                x = features(row)
                logits = [sum(w * f for w, f in zip(line, x, strict=True)) for line in WEIGHTS.tolist()]
                total = sum(math.exp(z) for z in logits)
                weight = min(math.exp(logits[token] - math.log(total) - recorded), SETTINGS.correction_high)
                for v in range(V):
                    step = weight * advantage * (float(v == token) - math.exp(logits[v]) / total)
                    for k in range(V):
                        gradient[v][k] -= step * x[k]
                row.append(token)
                num_tokens += 1
    return torch.tensor(gradient, dtype=torch.float64) / num_tokens


def difference(got, expected):
    """The largest of any two entries."""
    return (got - expected).abs().max().item()


SESSIONS = random_sessions()
WHOLE = window_gradient(groups_of(SESSIONS))


def test_the_gradient_is_the_closed_form():
    assert difference(WHOLE, closed_form(SESSIONS)) < 1e-7  # float32 advantages and recorded log-probs
    assert WHOLE.abs().max() > 1e-3


@given(st.integers(1, 20), st.integers(1, 400))
def test_any_number_of_ranks_and_any_microbatch_budget_give_one_gradient(num_ranks, microbatch_tokens):
    assert difference(window_gradient(groups_of(SESSIONS), num_ranks, microbatch_tokens), WHOLE) < ROUNDING


@given(st.randoms(), st.integers(1, 4))
def test_the_order_of_groups_and_of_their_rollouts_does_not_matter(random, num_ranks):
    sessions = list(SESSIONS)
    random.shuffle(sessions)
    assert difference(window_gradient(groups_of(sessions), num_ranks, 60), WHOLE) < ROUNDING


@pytest.mark.parametrize("name", ["grpo", "rloo", "group_mean", "reinforce_pp"])
def test_a_rollout_cut_into_segments_at_turn_boundaries_gives_the_same_gradient(name):
    advantages = partial(compute_advantages, name, gamma=1.0)
    # Each session is recorded again as a client would that opens a new segment, re-sending everything, at each turn.
    cut = [(g, n, recorded_as_segments(turns), reward) for g, n, turns, reward in SESSIONS]
    groups = groups_of(cut)
    assert sum(len(r.experiences) for g in groups for r in g.rollouts) > 2 * len(SESSIONS)
    whole = window_gradient(groups_of(SESSIONS), advantages=advantages)
    spread = window_gradient(groups, num_ranks=3, microbatch_tokens=50, advantages=advantages)
    assert difference(spread, whole) < ROUNDING


def recorded_as_segments(turns):
    row: list[int] = []
    out = []
    for t in turns:
        row += t.context_ids
        reason = "history_rewritten" if out else "start"
        out.append(turn(t.turn_id, None, list(row), t.token_ids, t.logprobs, opened_by=reason))
        row += t.token_ids
    return out


def test_a_fork_trains_the_shared_turn_once():
    """Two leaves under one turn give the gradient of the three turns' tokens, each once."""
    root = turn("a", None, [0, 1], [2, 3], [-1.5, -1.4])
    left, right = turn("b", root, [4], [1], [-1.6]), turn("c", root, [0], [2, 2], [-1.2, -1.9])
    forked = groups_of([("g", "x", [root, left, right], 1.0), ("g", "y", [turn("d", None, [3], [1], [-1.0])], 0.0)])
    first, second = forked[0].rollouts[0].experiences
    assert (first.num_actions, second.num_actions) == (3, 2)
    alone = turn("c", None, [0, 1, 2, 3, 0], [2, 2], [-1.2, -1.9])
    separate = groups_of([("g", "x", [root, left, alone], 1.0), ("g", "y", [turn("d", None, [3], [1], [-1.0])], 0.0)])
    assert difference(window_gradient(forked), window_gradient(separate)) < ROUNDING


def test_a_discount_passes_over_tool_tokens():
    """However much tool text lies between two turns, the earlier one is one action away from the later."""
    advantages = partial(compute_advantages, "reinforce_pp", gamma=0.5)

    def returns(tool_text):
        first = turn("a", None, [0], [1, 2], [-1.0, -1.0])
        last = turn("b", first, tool_text, [3], [-1.0])
        groups = groups_of([("g", "x", [first, last], 1.0), ("g", "y", [turn("c", None, [3], [1], [-1.0])], 0.0)])
        (window,) = build_window(
            groups, step=1, policy_version=0, num_ranks=1, microbatch_tokens=100, advantages=advantages
        )
        rows = [row for microbatch in window.ranks[0] for row in microbatch.rows]
        return next(row.advantages.tolist() for row in rows if row.experience.rollout_id == "x")

    # returns 1/4, 1/2, 1 and 0: mean 7/16, population std sqrt(35)/16
    expected = [(g - 7 / 16) / (math.sqrt(35) / 16) for g in (0.25, 0.5, 1.0)]
    assert returns([4]) == pytest.approx(expected, abs=1e-6)
    assert returns([4, 0, 4, 0, 4]) == pytest.approx(expected, abs=1e-6)
