"""Log-probs of sampled tokens: against loops, in the sampler's distribution, and the same in chunks."""

import math

import pytest
import torch

from molt.train.loss import gather_logprobs


def example(T=7, V=11, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(T, V, generator=generator, dtype=dtype) * 3
    targets = torch.randint(V, (T,), generator=generator)
    return logits, targets


def oracle(logits, targets, temperature):
    out = []
    for row, target in zip(logits.tolist(), targets.tolist(), strict=True):
        scaled = [x / temperature for x in row]
        out.append(scaled[target] - math.log(math.fsum(math.exp(x) for x in scaled)))
    return out


@pytest.mark.parametrize("temperature", [0.3, 1.0, 1.7])
def test_equal_to_the_loop(temperature):
    logits, targets = example()
    expected = oracle(logits, targets, temperature)
    assert gather_logprobs(logits, targets, temperature).tolist() == pytest.approx(expected, rel=1e-12)


def test_temperature_belongs_to_the_logits():
    # softmax of (ln 4, 0) at temperature 2 is (2/3, 1/3); the raw log-prob halved would be ln(4/5) / 2
    logits, targets = torch.tensor([[math.log(4.0), 0.0]], dtype=torch.float64), torch.tensor([0])
    got = gather_logprobs(logits, targets, 2.0).item()
    assert got == pytest.approx(math.log(2 / 3))
    assert got != pytest.approx(math.log(4 / 5) / 2, abs=0.1)


def test_half_precision_logits_are_widened_before_the_softmax():
    logits, targets = example(dtype=torch.bfloat16)
    got = gather_logprobs(logits, targets, 1.0)
    assert got.dtype == torch.float32
    assert got.tolist() == pytest.approx(oracle(logits.double(), targets, 1.0), abs=1e-5)


@pytest.mark.parametrize("chunk_size", [1, 3, 6, 7, 100])
def test_chunks_give_the_same_values_and_gradients(chunk_size):
    logits, targets = example()
    whole, parts = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    weights = torch.arange(1.0, 8.0, dtype=torch.float64)
    expected = gather_logprobs(whole, targets, 0.7)
    got = gather_logprobs(parts, targets, 0.7, chunk_size=chunk_size)
    assert torch.equal(got, expected)
    (expected * weights).sum().backward()
    (got * weights).sum().backward()
    torch.testing.assert_close(parts.grad, whole.grad, rtol=1e-12, atol=1e-12)


def test_no_positions_give_no_logprobs():
    logits, targets = example(T=0)
    assert gather_logprobs(logits, targets, 1.0, chunk_size=4).shape == (0,)


def test_parity_with_the_recorded_values_fails_under_a_shift_of_one_token():
    logits, targets = example(T=20)
    recorded = torch.tensor(oracle(logits, targets, 1.0), dtype=torch.float64)
    assert (gather_logprobs(logits, targets, 1.0) - recorded).abs().max() < 1e-12
    shifted = gather_logprobs(logits[:-1], targets[1:], 1.0)
    assert (shifted - recorded[1:]).abs().max() > 0.1
