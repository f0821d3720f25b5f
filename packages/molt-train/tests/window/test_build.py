"""Groups to a window: a rollout counts once, each row gets its own slice, and the statistics are over actions."""

import json
import math
import subprocess
import sys

import numpy as np
import pytest

from molt.train.window import build_window, window_stats


class Recorder:
    """An estimator that numbers the action tokens and remembers what it was asked."""

    def __init__(self):
        self.calls = []

    def __call__(self, rewards, groups, num_actions):
        self.calls.append((rewards.tolist(), groups.tolist(), num_actions.tolist()))
        return np.arange(num_actions.sum(), dtype=np.float64)


@pytest.fixture
def groups(make_group):
    return [
        make_group("a", (1.0, [(10, 3, [4]), (6, 1, [5]), (8, 2, [5])]), (0.0, [(7, 2, [3, 5])])),
        make_group("b", (0.5, []), (0.25, [(12, 4, [5])])),
    ]


def build(groups, advantages, *, num_ranks=2, microbatch_tokens=16):
    (window,) = build_window(
        groups,
        step=3,
        policy_version=7,
        num_ranks=num_ranks,
        microbatch_tokens=microbatch_tokens,
        advantages=advantages,
    )
    return window


def rows_of(window):
    return {
        row.experience.segment_id: row.advantages.tolist()
        for rank in window.ranks
        for microbatch in rank
        for row in microbatch.rows
    }


def test_a_rollout_counts_once_whatever_its_number_of_segments(groups):
    recorder = Recorder()
    build(groups, recorder)
    assert recorder.calls == [([1.0, 0.0, 0.5, 0.25], [0, 0, 1, 1], [6, 2, 0, 4])]


def test_each_row_gets_the_slice_of_its_own_actions(groups):
    window = build(groups, Recorder())
    assert rows_of(window) == {
        "a-0/0": [0.0, 1.0, 2.0],
        "a-0/1": [3.0],
        "a-0/2": [4.0, 5.0],
        "a-1/0": [6.0, 7.0],
        "b-1/0": [8.0, 9.0, 10.0, 11.0],
    }
    assert (window.step, window.policy_version, window.num_action_tokens) == (3, 7, 12)
    dtypes = {row.advantages.dtype for rank in window.ranks for m in rank for row in m.rows}
    assert dtypes == {np.dtype(np.float32)}


def test_ranks_are_balanced_and_make_equally_many_microbatches(groups):
    window = build(groups, Recorder(), microbatch_tokens=16)
    layout = [[[row.experience.num_tokens for row in m.rows] for m in rank] for rank in window.ranks]
    # lengths 12 10 8 7 6: 12 | 10, 8 to the 10, 7 to the 12, 6 to the 18 against 19; two rows of 8 fit into 16
    assert layout == [[[12], [7]], [[10], [8, 6]]]


def test_an_idle_rank_has_empty_microbatches(groups):
    window = build(groups[1:], Recorder(), num_ranks=3)
    assert [[len(m.rows) for m in rank] for rank in window.ranks] == [[1], [0], [0]]


def test_no_row_is_dropped_at_the_tail(make_group):
    groups = [make_group(f"g{i}", (1.0, [(5 + i, 2, [0])]), (0.0, [(9, 1, [0])])) for i in range(7)]
    window = build(groups, Recorder(), num_ranks=4, microbatch_tokens=20)
    assert len(rows_of(window)) == 14
    assert window.num_action_tokens == 21


def test_a_window_without_actions_is_empty_and_has_denominator_zero(make_group):
    window = build([make_group("g", (1.0, []), (0.0, []))], Recorder())
    assert window.num_action_tokens == 0
    assert rows_of(window) == {}
    assert rows_of(build([], Recorder())) == {}


def test_advantages_of_the_wrong_length_are_refused(groups):
    with pytest.raises(ValueError, match=r"advantages have shape \(4,\); the window has 12 action tokens"):
        build(groups, lambda rewards, groups, num_actions: np.zeros(4))


def test_a_rollout_without_a_reward_is_named(make_group):
    with pytest.raises(ValueError, match="rollout 'g-0' ended 'failed' and has no reward"):
        build([make_group("g", (None, [(5, 1, [0])], "failed"))], Recorder())


def test_statistics_of_a_window(groups, make_rollout, make_group):
    stats = window_stats(groups, 7)
    # versions behind 7: three actions by 3, one and two by 2, two by 3 on the mean (4 and 2), four by 2
    assert stats == {
        "reward_mean": 0.4375,
        "reward_std": pytest.approx(math.sqrt(sum((r - 0.4375) ** 2 for r in (1, 0, 0.5, 0.25)) / 4)),
        "num_rollouts": 4,
        "num_segments": 5,
        "num_action_tokens": 12,
        "staleness_mean": pytest.approx((3 * 3 + 2 + 2 * 2 + 2 * 3 + 4 * 2) / 12),
        "staleness_max": 4,
        "delivered_fraction": 1.0,
    }
    partly = make_rollout("x", "g", 1.0, [(4, 2, [7])], delivered_fraction=0.5)
    half = make_group("g", (1.0, []))
    half = type(half)(group_id="g", task_id="t", rollouts=(partly, *half.rollouts))
    assert window_stats([half], 7)["delivered_fraction"] == 0.75


def test_statistics_of_an_empty_window_are_finite_and_json(make_group):
    for groups in ([], [make_group("g", (1.0, []))]):
        stats = window_stats(groups, 7)
        assert all(math.isfinite(value) for value in stats.values())
        assert json.loads(json.dumps(stats)) == stats


def test_the_pure_stages_import_nothing_heavy():
    code = (
        "import sys, molt.train.window, molt.train.trajectory, molt.train.experience\n"
        "print([m for m in ('torch', 'ray', 'vllm', 'transformers') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=30)
    assert done.stdout.strip() == "[]"


def test_optimizer_steps_share_the_groups_and_one_call_of_the_estimator(groups):
    calls = []

    def advantages(rewards, group_numbers, num_actions):
        calls.append(rewards.tolist())
        return np.arange(num_actions.sum(), dtype=np.float32)

    first, second = build_window(
        groups, num_steps=2, step=3, policy_version=7, num_ranks=1, microbatch_tokens=64, advantages=advantages
    )
    assert calls == [[1.0, 0.0, 0.5, 0.25]]
    assert first.num_action_tokens == 3 + 1 + 2 + 2
    assert second.num_action_tokens == 4
    assert list(rows_of(second).values()) == [[8.0, 9.0, 10.0, 11.0]]
