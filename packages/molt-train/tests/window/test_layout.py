"""Rows to ranks and to microbatches: nothing lost, budgets kept, the same every time."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from molt.train.window.assign import assign
from molt.train.window.pack import equalise, pack

lengths = st.lists(st.integers(1, 200), max_size=40)


def test_the_longest_row_left_goes_to_the_emptiest_rank():
    # 7 | 6; 5 to the 6 would be 11, to the 7 12 -> rank 1; then 4 -> rank 0 (11 and 11); then 3 -> rank 0
    assert assign([3, 7, 5, 6, 4], 2) == [[1, 4, 0], [3, 2]]


def test_equal_rows_are_dealt_in_order():
    assert assign([5, 5, 5, 5], 2) == [[0, 2], [1, 3]]


def test_more_ranks_than_rows_leaves_ranks_empty():
    assert assign([4], 3) == [[0], [], []]
    assert assign([], 2) == [[], []]


@given(lengths, st.integers(1, 6))
def test_every_row_is_on_one_rank_and_the_load_is_even(num_tokens, num_ranks):
    ranks = assign(num_tokens, num_ranks)
    assert len(ranks) == num_ranks
    assert sorted(i for rank in ranks for i in rank) == list(range(len(num_tokens)))
    loads = [sum(num_tokens[i] for i in rank) for rank in ranks]
    assert max(loads) - min(loads) <= max(num_tokens, default=0)


def test_like_lengths_share_a_microbatch_under_the_padded_budget():
    # sorted 9 8 | 5 5 4 | 2: two rows padded to 9 are 18, three to 5 are 15
    assert pack([5, 9, 2, 8, 5, 4], budget=18) == [[1, 3], [0, 4, 5], [2]]


@given(lengths, st.integers(1, 300))
def test_every_row_is_in_one_microbatch_and_only_a_row_alone_exceeds_the_budget(num_tokens, budget):
    microbatches = pack(num_tokens, budget=budget)
    assert sorted(i for m in microbatches for i in m) == list(range(len(num_tokens)))
    for microbatch in microbatches:
        padded = len(microbatch) * max(num_tokens[i] for i in microbatch)
        assert padded <= budget or len(microbatch) == 1
    flat = [num_tokens[i] for m in microbatches for i in m]
    assert flat == sorted(num_tokens, reverse=True)


@given(lengths, st.integers(1, 300))
def test_no_microbatch_could_have_taken_the_row_after_it(num_tokens, budget):
    microbatches = pack(num_tokens, budget=budget)
    for microbatch in microbatches[:-1]:
        assert (len(microbatch) + 1) * num_tokens[microbatch[0]] > budget


@pytest.mark.parametrize(
    ("ranks", "expected"),
    [
        ([[[0], [1]], [[2]], []], [[[0], [1]], [[2], []], [[], []]]),
        ([[], []], [[], []]),
    ],
)
def test_short_ranks_get_empty_microbatches(ranks, expected):
    assert equalise(ranks) == expected
