"""What each token counts: the published formulas by hand, and counted out token by token."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from molt.train.errors import ConfigError
from molt.train.window import rollout_weights

AGGREGATIONS = ["token_mean", "sequence_mean", "constant", "prompt_mean"]
derandomized = settings(derandomize=True, deadline=None)


def reduced(losses, prompts, aggregation, length=0):
    """The loss of rollouts with these token losses."""
    weights = rollout_weights([len(of) for of in losses], prompts, aggregation=aggregation, length=length)
    return sum(weight * loss for weight, of in zip(weights, losses, strict=True) for loss in of)


def test_the_token_mean_of_2_2_2_and_10_is_4():
    """Not 6, the mean of the two microbatches' means."""
    assert reduced([[2, 2, 2], [10]], [0, 0], "token_mean") == pytest.approx(4.0, abs=1e-12)


@pytest.mark.parametrize(
    ("aggregation", "expected"),
    [
        # prompt 0 has [1, 3] and [5], prompt 1 has [2, 4, 6]
        ("token_mean", (1 + 3 + 5 + 2 + 4 + 6) / 6),
        ("sequence_mean", (2 + 5 + 4) / 3),
        ("constant", (4 + 5 + 12) / (3 * 10)),
        ("prompt_mean", (3 + 4) / 2),
    ],
)
def test_each_aggregation_by_hand(aggregation, expected):
    assert reduced([[1, 3], [5], [2, 4, 6]], [0, 0, 1], aggregation, 10) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_a_rollout_without_action_tokens_stays_in_the_counts_and_weighs_nothing(aggregation):
    weights = rollout_weights([2, 0], [0, 1], aggregation=aggregation, length=10)
    # token mean 1/2; mean of two rollouts 1/(2*2); constant 1/(2*10); mean of two prompts 1/(2*2)
    expected = {"token_mean": 1 / 2, "sequence_mean": 1 / 4, "constant": 1 / 20, "prompt_mean": 1 / 4}
    assert weights[0] == pytest.approx(expected[aggregation], abs=1e-15)
    assert aggregation == "token_mean" or weights[1] == 0.0


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_no_tokens_and_no_rollouts_give_weights_that_are_finite(aggregation):
    assert rollout_weights([0, 0], [0, 0], aggregation=aggregation, length=10).tolist() == [0.0, 0.0]
    assert rollout_weights([], [], aggregation=aggregation, length=10).tolist() == []


def test_the_constant_needs_a_length():
    with pytest.raises(ConfigError, match=r"^algorithm.aggregation_length is 0, but 'constant' divides by it; set it"):
        rollout_weights([2], [0], aggregation="constant")


rollouts = st.lists(st.tuples(st.integers(0, 5), st.integers(0, 3)), min_size=1, max_size=12)


@derandomized
@given(rollouts, st.sampled_from(AGGREGATIONS))
def test_the_weights_are_those_of_nested_means(members, aggregation):
    losses = [[float(10 * i + j) for j in range(tokens)] for i, (tokens, _) in enumerate(members)]
    prompts = [prompt for _, prompt in members]
    expected = 0.0
    if aggregation == "token_mean":
        flat = [loss for of in losses for loss in of]
        expected = sum(flat) / len(flat) if flat else 0.0
    elif aggregation == "sequence_mean":
        expected = sum(sum(of) / len(of) if of else 0.0 for of in losses) / len(losses)
    elif aggregation == "constant":
        expected = sum(sum(of) / 7 for of in losses) / len(losses)
    else:
        for prompt in set(prompts):
            flat = [loss for of, p in zip(losses, prompts, strict=True) if p == prompt for loss in of]
            expected += (sum(flat) / len(flat) if flat else 0.0) / len(set(prompts))
    assert reduced(losses, prompts, aggregation, 7) == pytest.approx(expected, rel=1e-12, abs=1e-12)


@derandomized
@given(rollouts, st.sampled_from(AGGREGATIONS), st.randoms(use_true_random=False))
def test_the_order_of_rollouts_does_not_matter(members, aggregation, random):
    order = list(range(len(members)))
    random.shuffle(order)

    def weights(of):
        return rollout_weights([t for t, _ in of], [p for _, p in of], aggregation=aggregation, length=7)

    assert np.array_equal(weights([members[i] for i in order]), weights(members)[order])


def test_short_and_long_rollouts_by_aggregation():
    """A token of a short rollout outweighs one of a long rollout of the prompt in the sequence mean only."""
    short, long = rollout_weights([1, 9], [0, 0], aggregation="sequence_mean")
    assert short == pytest.approx(9 * long)
    for aggregation in ("token_mean", "constant", "prompt_mean"):
        short, long = rollout_weights([1, 9], [0, 0], aggregation=aggregation, length=4)
        assert short == long
