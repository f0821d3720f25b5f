"""Fingerprints of weights: equal where weights are, different where anything that is looked at differs."""

import itertools

import pytest
import torch

from molt.train.refit.digest import SAMPLE_SIZE, differing, digest

LARGE = 10 * SAMPLE_SIZE + 7


@pytest.mark.parametrize("level", ["sample", "full"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(), (0,), (3,), (5, 7), (LARGE,)])
def test_a_copy_has_the_same_digest_wherever_and_however_it_lies(level, dtype, shape):
    weight = torch.randn(shape).to(dtype)
    strided = torch.stack([weight, weight], -1)[..., 0]
    assert digest(weight, level) == digest(weight.clone(), level) == digest(strided, level)


@pytest.mark.parametrize("level", ["sample", "full"])
def test_type_shape_and_order_count(level):
    weight = torch.arange(6.0)
    variants = [weight, weight.flip(0), weight.reshape(2, 3), weight.reshape(3, 2), weight.double(), weight.int()]
    assert len({digest(variant, level) for variant in variants}) == len(variants)


@pytest.mark.parametrize("size", [1, SAMPLE_SIZE - 1, SAMPLE_SIZE])
def test_small_weights_are_sampled_whole(size):
    weight = torch.zeros(size)
    for place in {0, size // 2, size - 1}:
        other = weight.clone()
        other[place] = 1
        assert digest(other, "sample") != digest(weight, "sample")


def test_a_sample_has_both_ends_and_is_spread_evenly_while_full_has_every_element():
    weight = torch.zeros(LARGE)
    seen = []
    for place in range(LARGE):
        weight[place] = 1
        if place in (0, LARGE - 1) or place % 997 == 0:
            assert digest(weight, "full") != digest(torch.zeros(LARGE), "full")
        seen.append(digest(weight, "sample") != digest(torch.zeros(LARGE), "sample"))
        weight[place] = 0
    places = [place for place, is_seen in enumerate(seen) if is_seen]
    assert (places[0], places[-1], len(places)) == (0, LARGE - 1, SAMPLE_SIZE)
    steps = {after - before for before, after in itertools.pairwise(places)}
    assert steps <= {10, 11}


def test_names_that_differ_are_found_on_either_side():
    sent, held = {"a": "1", "b": "2", "c": "3"}, {"a": "1", "b": "x", "d": "4"}
    assert differing(sent, held) == ["b", "c", "d"]
    assert differing(sent, dict(sent)) == []
