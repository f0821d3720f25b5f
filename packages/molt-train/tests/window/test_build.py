"""Groups to a window: a rollout counts once, each row gets its own slice, and the statistics are over actions."""

import json
import math
import subprocess
import sys

import numpy as np
import pytest

from molt.train.config import Config, load_config
from molt.train.records.window import Scores
from molt.train.window import (
    WindowPlan,
    attach,
    build_rows,
    in_row_order,
    lay_out,
    plan_of,
    rollout_arrays,
    window_stats,
)


@pytest.fixture
def groups(make_group):
    return [
        make_group("a", (1.0, [(10, 3, [4]), (6, 1, [5]), (8, 2, [5])]), (0.0, [(7, 2, [3, 5])])),
        make_group("b", (0.5, []), (0.25, [(12, 4, [5])])),
    ]


PLAN = WindowPlan(num_ranks=2, microbatch_tokens=16)


def plan(**changes):
    return WindowPlan(**{**vars(PLAN), **changes})


def build(groups, plan=PLAN):
    """The window of one optimizer step, its action tokens numbered."""
    steps = build_rows(groups, plan)
    num_tokens = sum(row.experience.num_actions for row in steps[0])
    (window,) = lay_out(attach(steps, np.arange(num_tokens, dtype=np.float64)), plan, step=3, policy_version=7)
    return window


def laid_out(window):
    return [row for rank in window.ranks for microbatch in rank for row in microbatch.rows]


def rows_of(window):
    return {row.experience.segment_id: row.advantages.tolist() for row in laid_out(window)}


def test_a_rollout_counts_once_whatever_its_number_of_segments(groups):
    arrays = rollout_arrays(groups)
    assert arrays.rewards_R.tolist() == [1.0, 0.0, 0.5, 0.25]
    assert arrays.groups_R.tolist() == [0, 0, 1, 1]
    assert arrays.num_actions_R.tolist() == [6, 2, 0, 4]
    assert [len(array) for array in vars(rollout_arrays([])).values()] == [0, 0, 0]


def test_each_row_gets_the_slice_of_its_own_actions(groups):
    window = build(groups)
    assert rows_of(window) == {
        "a-0/0": [0.0, 1.0, 2.0],
        "a-0/1": [3.0],
        "a-0/2": [4.0, 5.0],
        "a-1/0": [6.0, 7.0],
        "b-1/0": [8.0, 9.0, 10.0, 11.0],
    }
    assert (window.step, window.policy_version, window.num_action_tokens) == (3, 7, 12)
    assert {row.advantages.dtype for row in laid_out(window)} == {np.dtype(np.float32)}


def test_segments_share_the_number_and_the_weight_of_their_rollout(groups):
    """The rollout without tokens has number 2; T counts all three segments of the first, 6 tokens."""
    window = build(groups, plan(aggregation="sequence_mean"))
    numbers = {row.experience.segment_id: (row.rollout, row.weight) for row in laid_out(window)}
    assert numbers == {
        "a-0/0": (0, 1 / 24),
        "a-0/1": (0, 1 / 24),
        "a-0/2": (0, 1 / 24),
        "a-1/0": (1, 1 / 8),
        "b-1/0": (3, 1 / 16),
    }
    assert window.num_rollouts == 4
    assert {row.weight for row in laid_out(build(groups))} == {1 / 12}


def test_rows_have_no_advantages_until_they_are_attached(groups):
    (rows,) = build_rows(groups, PLAN)
    assert [row.experience.segment_id for row in rows] == ["a-0/0", "a-0/1", "a-0/2", "a-1/0", "b-1/0"]
    assert [row.advantages.tolist() for row in rows] == [[0.0] * n for n in (3, 1, 2, 2, 4)]
    assert {row.reference is row.values is row.returns is None for row in rows} == {True}


def test_what_the_ranks_computed_comes_back_to_its_own_row(groups):
    for num_steps in (1, 2):
        own = plan(num_steps=num_steps, microbatch_tokens=10)
        steps = build_rows(groups, own)
        windows = lay_out(steps, own, step=1, policy_version=0)
        # Each rank answers in the order in which it was given its rows.
        answers = [
            [Scores(reference=np.full(row.experience.num_actions, row.experience.num_tokens)) for row in laid_out(w)]
            for w in windows
        ]
        assert [len(w) for w in answers] == [len(rows) for rows in steps]
        ordered = in_row_order(answers, steps, own)
        assert [score.reference[0] for score in ordered] == [10, 6, 8, 7, 12]


def test_scores_and_returns_are_attached_next_to_the_advantages(groups):
    steps = build_rows(groups, plan(num_steps=2))
    lengths = [row.experience.num_actions for rows in steps for row in rows]
    scores = [Scores(reference=np.full(n, -1.0 * i), values=np.full(n, 1.0 * i)) for i, n in enumerate(lengths)]
    attached = attach(steps, np.arange(12.0), returns_N=np.arange(12.0) + 100, scores=scores)
    assert [len(rows) for rows in attached] == [4, 1]
    last = attached[1][0]
    assert last.advantages.tolist() == [8.0, 9.0, 10.0, 11.0]
    assert last.returns.tolist() == [108.0, 109.0, 110.0, 111.0]
    assert last.reference.tolist() == [-4.0] * 4
    assert last.values.tolist() == [4.0] * 4
    assert last.experience is steps[1][0].experience


def test_attaching_changes_no_layout(groups):
    steps = build_rows(groups, PLAN)
    (before,) = lay_out(steps, PLAN, step=1, policy_version=0)
    (after,) = lay_out(attach(steps, np.arange(12.0)), PLAN, step=1, policy_version=0)
    assert [r.experience.segment_id for r in laid_out(before)] == [r.experience.segment_id for r in laid_out(after)]


def test_ranks_are_balanced_and_make_equally_many_microbatches(groups):
    window = build(groups, plan(layout="packed"))
    layout = [[[row.experience.num_tokens for row in m.rows] for m in rank] for rank in window.ranks]
    # lengths 12 10 8 7 6: 22 and 21 tokens; into a microbatch of 16 go 8 and 7 together
    assert layout == [[[12], [10]], [[8, 7], [6]]]


def test_the_expensive_microbatches_of_all_ranks_run_together(make_group):
    """Attention is most of the cost here: one row of 30 tokens is more than four of 8, which are 32."""
    lengths = [30, 30, 30, 30, *[8] * 16]
    group = make_group("g", *[(1.0, [(tokens, 1, [0])]) for tokens in lengths])
    window = build([group], plan(num_ranks=4, microbatch_tokens=33, layout="packed", hidden_size=1))
    layout = [[[row.experience.num_tokens for row in m.rows] for m in rank] for rank in window.ranks]
    assert layout == [[[30], [8, 8, 8, 8]]] * 4


def test_an_idle_rank_has_empty_microbatches(groups):
    window = build(groups[1:], plan(num_ranks=3))
    assert [[len(m.rows) for m in rank] for rank in window.ranks] == [[1], [0], [0]]


@pytest.mark.parametrize("layout", ["padded", "packed"])
@pytest.mark.parametrize("num_steps", [1, 2, 3])
def test_no_row_is_dropped_at_the_tail(make_group, layout, num_steps):
    """Seven groups do not divide by the steps, their rows not by the ranks: each row is there once all the same."""
    groups = [make_group(f"g{i}", (1.0, [(5 + i, 2, [0])]), (0.0, [(9, 1, [0])])) for i in range(7)]
    own = plan(num_ranks=4, microbatch_tokens=20, layout=layout, num_steps=num_steps)
    windows = lay_out(build_rows(groups, own), own, step=1, policy_version=0)
    assert len(windows) == num_steps
    trained = sorted(row.experience.segment_id for window in windows for row in laid_out(window))
    assert trained == sorted(f"g{i}-{j}/0" for i in range(7) for j in (0, 1))
    assert sum(window.num_action_tokens for window in windows) == 21
    assert sorted(row.rollout for window in windows for row in laid_out(window)) == list(range(14))
    # the weights of each step are those of a mean over its own tokens, whatever the step's size
    for window in windows:
        assert sum(row.weight * row.experience.num_actions for row in laid_out(window)) == pytest.approx(1.0)


def test_a_window_without_actions_is_empty_and_has_denominator_zero(make_group):
    window = build([make_group("g", (1.0, []), (0.0, []))])
    assert window.num_action_tokens == 0
    assert rows_of(window) == {}
    assert rows_of(build([])) == {}


def test_arrays_of_the_wrong_length_are_refused(groups):
    steps = build_rows(groups, PLAN)
    with pytest.raises(ValueError, match=r"advantages have shape \(4,\); the window has 12 action tokens"):
        attach(steps, np.zeros(4))
    with pytest.raises(ValueError, match=r"returns have shape \(4,\); the window has 12 action tokens"):
        attach(steps, np.zeros(12), returns_N=np.zeros(4))


def test_a_rollout_without_a_reward_is_named(make_group):
    with pytest.raises(ValueError, match="rollout 'g-0' ended 'failed' and has no reward"):
        rollout_arrays([make_group("g", (None, [(5, 1, [0])], "failed"))])


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


def test_optimizer_steps_share_the_groups_in_order_and_number_rollouts_through(groups):
    own = plan(num_steps=2, num_ranks=1, microbatch_tokens=64)
    steps = attach(build_rows(groups, own), np.arange(12.0))
    first, second = lay_out(steps, own, step=3, policy_version=7)
    assert first.num_action_tokens == 3 + 1 + 2 + 2
    assert second.num_action_tokens == 4
    assert list(rows_of(second).values()) == [[8.0, 9.0, 10.0, 11.0]]
    assert ({row.rollout for row in laid_out(first)}, {row.rollout for row in laid_out(second)}) == ({0, 1}, {3})
    assert (first.num_rollouts, second.num_rollouts) == (4, 4), "one table of rollouts for all steps"
    assert ({row.weight for row in laid_out(first)}, {row.weight for row in laid_out(second)}) == ({1 / 8}, {1 / 4})


def test_the_plan_of_a_run_is_in_its_configuration(tmp_path):
    (tmp_path / "config.toml").write_text(
        "[algorithm]\naggregation = 'constant'\nupdates_per_window = 2\n[actor]\nnum_ranks = 3\n"
        "[train]\nmicrobatch_tokens = 99\n[rollout]\nmax_tokens = 77\n"
    )
    config = load_config(tmp_path / "config.toml", [], Config)
    assert plan_of(config, hidden_size=8) == WindowPlan(
        num_ranks=3,
        microbatch_tokens=99,
        layout="padded",
        hidden_size=8,
        num_steps=2,
        aggregation="constant",
        aggregation_length=77,
    )
    arguments = ["algorithm.aggregation_length=5", "actor.layout=packed"]
    other = plan_of(load_config(tmp_path / "config.toml", arguments, Config), hidden_size=8)
    assert (other.aggregation_length, other.layout) == (5, "packed")
