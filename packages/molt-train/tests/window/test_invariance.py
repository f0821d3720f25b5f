"""The update does not depend on how a window is cut: into ranks, microbatches, or the segments of a rollout.

A toy policy whose logits are a linear function of everything before the token, trained through the real path: turn
tree, trajectory, payload, window, loss, denominator. The oracle is the closed form of its gradient, in plain loops.
"""

import math

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from molt.train.advantage import EstimatorSettings, compute_advantages
from molt.train.config import AlgorithmConfig
from molt.train.config.presets import correction_rule
from molt.train.experience import LocalPayloadStore, offload_trained
from molt.train.loss import LossInputs, correction_weights, policy_loss, weighted_sum
from molt.train.records.rollout import Group, Outcome, Rollout
from molt.train.records.turn import Turn
from molt.train.trajectory import build_trajectory
from molt.train.window import WindowPlan, attach, build_rows, lay_out, rollout_arrays

V = 5
SETTINGS = AlgorithmConfig(correction="tis", correction_high=1.1)
AGGREGATIONS = ["token_mean", "sequence_mean", "constant", "prompt_mean"]
LENGTH = 7
PLAN = WindowPlan(num_ranks=1, microbatch_tokens=10**6, aggregation_length=LENGTH)
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
    segments = build_trajectory(name, turns).segments
    experiences = offload_trained(segments, LocalPayloadStore(), rollout_id=name, group_id=group_id)
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


def microbatch_loss(weights, microbatch, num_ranks):
    inputs, targets, behaviour, advantages, counts = [], [], [], [], []
    for row in microbatch.rows:
        payload = row.experience.payload
        tokens = payload.token_ids.tolist()
        for position in np.flatnonzero(payload.action_mask):
            inputs.append(features(tokens[:position]))
            targets.append(tokens[position])
            behaviour.append(float(payload.logprobs[position]))
            counts.append((row.weight, row.rollout))
        advantages += row.advantages.tolist()
    inputs_NV = torch.tensor(inputs, dtype=torch.float64).reshape(-1, V)
    targets_N = torch.tensor(targets, dtype=torch.int64)
    current_N = torch.log_softmax(inputs_NV @ weights.T, -1).gather(1, targets_N[:, None])[:, 0]
    behaviour_N = torch.tensor(behaviour, dtype=torch.float64)
    rollout_N = torch.tensor([rollout for _, rollout in counts], dtype=torch.int64)
    old_N = current_N.detach()
    correction_N, _ = correction_weights(old_N, behaviour_N, rollout_N, correction_rule(SETTINGS), None)
    loss_inputs = LossInputs(
        current_N=current_N,
        old_N=old_N,
        advantages_N=torch.tensor(advantages, dtype=torch.float64),
        correction_N=correction_N,
        sequence_N=rollout_N,
        num_sequences=100,
    )
    loss_N, _ = policy_loss(loss_inputs, settings=SETTINGS, kl_coef=0.0)
    weights_N = torch.tensor([weight for weight, _ in counts], dtype=torch.float64)
    return weighted_sum(loss_N, weights_N, dp_size=num_ranks)


def windows_of(groups, plan, estimator="grpo", gamma=1.0):
    rollouts = rollout_arrays(groups)
    advantages, _ = compute_advantages(
        estimator,
        rollouts.rewards_R,
        rollouts.groups_R,
        rollouts.num_actions_R,
        settings=EstimatorSettings(gamma=gamma),
    )
    return lay_out(attach(build_rows(groups, plan), advantages), plan, step=1, policy_version=0)


def window_gradient(groups, estimator="grpo", **plan):
    plan = WindowPlan(**{**vars(PLAN), **plan})
    (window,) = windows_of(groups, plan, estimator)
    per_rank = []
    for microbatches in window.ranks:
        weights = WEIGHTS.clone().requires_grad_()
        for microbatch in microbatches:
            microbatch_loss(weights, microbatch, plan.num_ranks).backward()
        per_rank.append(torch.zeros_like(weights) if weights.grad is None else weights.grad)
    return torch.stack(per_rank).mean(0)  # what FSDP does with the ranks' gradients


def token_weight(sessions, group_id, turns, aggregation):
    """What a token of one rollout counts, counted out one by one."""

    def length(of):
        return sum(1 for t in of for _ in t.token_ids)

    match aggregation:
        case "token_mean":
            return 1 / sum(length(of) for _, _, of, _ in sessions)
        case "sequence_mean":
            return 1 / (len(sessions) * length(turns))
        case "constant":
            return 1 / (len(sessions) * LENGTH)
        case "prompt_mean":
            mates = [of for g, _, of, _ in sessions if g == group_id]
            return 1 / (len({g for g, _, _, _ in sessions}) * sum(length(of) for of in mates))


def closed_form(sessions, aggregation):
    """-sum of w c A (onehot - softmax) x features, straight from the sessions, without trajectory or window."""
    by_group: dict[str, list[float]] = {}
    for group_id, _, _, reward in sessions:
        by_group.setdefault(group_id, []).append(reward)
    gradient = [[0.0] * V for _ in range(V)]
    for group_id, _, turns, reward in sessions:
        rewards = by_group[group_id]
        mean = sum(rewards) / len(rewards)
        std = math.sqrt(sum((r - mean) ** 2 for r in rewards) / (len(rewards) - 1))
        advantage = (reward - mean) / (std + 1e-6)
        counts = token_weight(sessions, group_id, turns, aggregation)
        row: list[int] = []
        for t in turns:
            row += t.context_ids
            for token, recorded in zip(t.token_ids, t.logprobs, strict=True):
                x = features(row)
                logits = [sum(w * f for w, f in zip(line, x, strict=True)) for line in WEIGHTS.tolist()]
                total = sum(math.exp(z) for z in logits)
                weight = min(math.exp(logits[token] - math.log(total) - recorded), SETTINGS.correction_high)
                for v in range(V):
                    step = counts * weight * advantage * (float(v == token) - math.exp(logits[v]) / total)
                    for k in range(V):
                        gradient[v][k] -= step * x[k]
                row.append(token)
    return torch.tensor(gradient, dtype=torch.float64)


def difference(got, expected):
    """The largest of any two entries."""
    return (got - expected).abs().max().item()


SESSIONS = random_sessions()
WHOLE = {name: window_gradient(groups_of(SESSIONS), aggregation=name) for name in AGGREGATIONS}
on_every_aggregation = pytest.mark.parametrize("aggregation", AGGREGATIONS)
derandomized = settings(derandomize=True, deadline=None, max_examples=25)


@on_every_aggregation
def test_the_gradient_is_the_closed_form(aggregation):
    whole = WHOLE[aggregation]
    # Advantages and recorded log-probs are float32.
    assert difference(whole, closed_form(SESSIONS, aggregation)) < 1e-7
    assert whole.abs().max() > 1e-3


def test_the_aggregations_differ():
    for a, b in [(a, b) for a in AGGREGATIONS for b in AGGREGATIONS if a < b]:
        assert difference(WHOLE[a], WHOLE[b]) > 1e-4, (a, b)


@on_every_aggregation
@derandomized
@given(st.integers(1, 20), st.integers(1, 400), st.sampled_from(["padded", "packed"]))
def test_any_number_of_ranks_and_any_microbatches_give_one_gradient(aggregation, num_ranks, budget, layout):
    """Twelve rollouts on up to twenty ranks: some of them are empty."""
    got = window_gradient(
        groups_of(SESSIONS), aggregation=aggregation, num_ranks=num_ranks, microbatch_tokens=budget, layout=layout
    )
    assert difference(got, WHOLE[aggregation]) < ROUNDING


@on_every_aggregation
@derandomized
@given(st.randoms(use_true_random=False), st.integers(1, 4))
def test_the_order_of_groups_and_of_their_rollouts_does_not_matter(aggregation, random, num_ranks):
    sessions = list(SESSIONS)
    random.shuffle(sessions)
    got = window_gradient(groups_of(sessions), aggregation=aggregation, num_ranks=num_ranks, microbatch_tokens=60)
    assert difference(got, WHOLE[aggregation]) < ROUNDING


@derandomized
@given(st.permutations(range(3)))
def test_the_order_of_ranks_does_not_matter(order):
    (window,) = windows_of(groups_of(SESSIONS), WindowPlan(num_ranks=3, microbatch_tokens=50))
    shuffled = msgspec.structs.replace(window, ranks=tuple(window.ranks[i] for i in order))
    weights = WEIGHTS.clone().requires_grad_()
    for microbatches in shuffled.ranks:
        for microbatch in microbatches:
            microbatch_loss(weights, microbatch, 1).backward()
    assert difference(weights.grad, WHOLE["token_mean"]) < ROUNDING


@on_every_aggregation
@pytest.mark.parametrize("estimator", ["grpo", "rloo", "group_mean", "batch_mean", "reinforce_pp"])
def test_a_rollout_cut_into_segments_at_turn_boundaries_gives_the_same_gradient(aggregation, estimator):
    # Each session is recorded again as a client would that opens a new segment, re-sending everything, at each turn.
    cut = [(g, n, recorded_as_segments(turns), reward) for g, n, turns, reward in SESSIONS]
    groups = groups_of(cut)
    assert sum(len(r.experiences) for g in groups for r in g.rollouts) > 2 * len(SESSIONS)
    whole = window_gradient(groups_of(SESSIONS), estimator, aggregation=aggregation)
    spread = window_gradient(groups, estimator, aggregation=aggregation, num_ranks=3, microbatch_tokens=50)
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


def test_every_optimizer_step_is_weighed_by_its_own_counts():
    """Two steps on two groups each are the updates of two windows of two groups."""
    groups = groups_of(SESSIONS)
    for aggregation in AGGREGATIONS:
        plan = WindowPlan(**{**vars(PLAN), "num_steps": 2, "aggregation": aggregation})
        windows = windows_of(groups, plan)
        for window, own in zip(windows, (groups[:2], groups[2:]), strict=True):
            weights = WEIGHTS.clone().requires_grad_()
            for microbatch in window.ranks[0]:
                microbatch_loss(weights, microbatch, 1).backward()
            assert difference(weights.grad, window_gradient(own, aggregation=aggregation)) < ROUNDING


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

    def returns(tool_text):
        first = turn("a", None, [0], [1, 2], [-1.0, -1.0])
        last = turn("b", first, tool_text, [3], [-1.0])
        groups = groups_of([("g", "x", [first, last], 1.0), ("g", "y", [turn("c", None, [3], [1], [-1.0])], 0.0)])
        (window,) = windows_of(groups, PLAN, "reinforce_pp", gamma=0.5)
        rows = [row for microbatch in window.ranks[0] for row in microbatch.rows]
        return next(row.advantages.tolist() for row in rows if row.experience.rollout_id == "x")

    # returns 1/4, 1/2, 1 and 0: mean 7/16, population std sqrt(35)/16
    expected = [(g - 7 / 16) / (math.sqrt(35) / 16) for g in (0.25, 0.5, 1.0)]
    assert returns([4]) == pytest.approx(expected, abs=1e-6)
    assert returns([4, 0, 4, 0, 4]) == pytest.approx(expected, abs=1e-6)
