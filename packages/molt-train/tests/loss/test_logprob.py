"""Log-probs and entropies of the head: against plain loops, in any chunks, with the gradients of the full logits."""

import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from molt.train.loss.logprob import gather_logprobs, head_logprobs

N, V, H = 7, 11, 3


def example(*, n=N, dtype=torch.float64, seed=0, bias=False):
    """(hidden, weight, bias, targets), of which those that are to be differentiated ask for it."""
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(n, H, generator=generator, dtype=torch.float64)
    weight = torch.randn(V, H, generator=generator, dtype=torch.float64) * 2
    bias_V = torch.randn(V, generator=generator, dtype=torch.float64) if bias else None
    targets = torch.randint(V, (n,), generator=generator)
    leaves = [None if leaf is None else leaf.to(dtype).requires_grad_() for leaf in (hidden, weight, bias_V)]
    return *leaves, targets


def oracle(hidden, weight, bias, targets, temperature):
    """(log-probs, entropies), token by token."""
    logprobs, entropies = [], []
    for state, target in zip(hidden.tolist(), targets.tolist(), strict=True):
        scaled = []
        for token, row in enumerate(weight.tolist()):
            logit = sum(x * w for x, w in zip(state, row, strict=True))
            scaled.append((logit + (0.0 if bias is None else bias.tolist()[token])) / temperature)
        total = math.fsum(math.exp(x) for x in scaled)
        logprobs.append(scaled[target] - math.log(total))
        entropies.append(-math.fsum(math.exp(x) / total * (x - math.log(total)) for x in scaled))
    return logprobs, entropies


def from_logits(hidden, weight, bias, targets, temperature):
    """The plain way, with every logit at once."""
    logprobs = (torch.nn.functional.linear(hidden, weight, bias) / temperature).log_softmax(-1)
    return logprobs.gather(-1, targets.unsqueeze(-1)).squeeze(-1), -(logprobs.exp() * logprobs).sum(-1)


def by_head(hidden, weight, bias, targets, temperature, chunk_size=3, with_entropy=True):
    return head_logprobs(
        hidden,
        weight,
        targets,
        temperature=temperature,
        chunk_size=chunk_size,
        with_entropy=with_entropy,
        bias_V=bias,
    )


def by_gather(hidden, weight, bias, targets, temperature, chunk_size=3, with_entropy=True):
    logits = torch.nn.functional.linear(hidden, weight, bias)
    return gather_logprobs(logits, targets, temperature=temperature, chunk_size=chunk_size, with_entropy=with_entropy)


def gradients(values, leaves):
    """Of a loss in which every token counts differently, and its entropy, too."""
    weights = torch.arange(1.0, len(values[0]) + 1, dtype=values[0].dtype)
    loss = (values[0] * weights).sum() + (values[1] ** 2 * weights).sum()
    return torch.autograd.grad(loss, [leaf for leaf in leaves if leaf is not None])


both_ways = pytest.mark.parametrize("compute", [by_head, by_gather])


@both_ways
@pytest.mark.parametrize("temperature", [0.3, 1.0, 1.7])
@pytest.mark.parametrize("bias", [False, True])
def test_values_equal_the_loop(compute, temperature, bias):
    operands = example(bias=bias)
    logprobs, entropies = compute(*operands, temperature)
    expected_logprobs, expected_entropies = oracle(*operands, temperature)
    assert logprobs.dtype == torch.float64
    assert logprobs.tolist() == pytest.approx(expected_logprobs, rel=1e-12)
    assert entropies.tolist() == pytest.approx(expected_entropies, rel=1e-10)


@both_ways
def test_the_temperature_divides_the_logits(compute):
    # softmax of (ln 4, 0) at temperature 2 is (2/3, 1/3); the raw log-prob halved would be ln(4/5) / 2
    hidden, weight = torch.tensor([[math.log(4.0)]]).double(), torch.tensor([[1.0], [0.0]]).double()
    logprobs, entropies = compute(hidden, weight, None, torch.tensor([0]), 2.0)
    assert logprobs.item() == pytest.approx(math.log(2 / 3))
    assert entropies.item() == pytest.approx(math.log(3) - 2 / 3 * math.log(2))
    assert logprobs.item() != pytest.approx(math.log(4 / 5) / 2, abs=0.1)


@both_ways
@pytest.mark.parametrize("chunk_size", [1, 3, 6, 7, 100])
@pytest.mark.parametrize("bias", [False, True])
def test_any_chunks_give_the_gradients_of_the_full_logits(compute, chunk_size, bias):
    operands = example(bias=bias)
    expected = gradients(from_logits(*operands, 0.7), operands[:3])
    found = gradients(compute(*operands, 0.7, chunk_size), operands[:3])
    assert len(found) == (3 if bias else 2)
    torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-12)


@given(seed=st.integers(0, 1000), temperature=st.floats(0.1, 3.0), chunk_size=st.integers(1, 9))
def test_gradients_are_those_of_finite_differences(seed, temperature, chunk_size):
    hidden, weight, bias, targets = example(n=3, seed=seed, bias=True)
    assert torch.autograd.gradcheck(
        lambda *leaves: by_head(*leaves, targets, temperature, chunk_size), (hidden, weight, bias), fast_mode=True
    )


def test_an_entropy_that_no_loss_uses_and_one_that_alone_is_used_are_right():
    operands = example()
    for part in range(2):
        expected = torch.autograd.grad(from_logits(*operands, 0.7)[part].sum(), operands[:2])
        found = torch.autograd.grad(by_head(*operands, 0.7)[part].sum(), operands[:2])
        torch.testing.assert_close(found, expected)


@both_ways
def test_without_entropy_none_is_given_and_the_log_probs_are_the_same(compute):
    operands = example()
    logprobs, entropies = compute(*operands, 0.7, with_entropy=False)
    assert entropies is None
    assert torch.allclose(logprobs, compute(*operands, 0.7)[0], rtol=1e-13)


@pytest.mark.parametrize("frozen", [0, 1])
def test_a_frozen_operand_gets_no_gradient_and_the_other_its_own(frozen):
    operands = list(example())
    expected = torch.autograd.grad(from_logits(*operands, 1.0)[0].sum(), operands[1 - frozen])
    operands[frozen] = operands[frozen].detach()
    by_head(*operands, 1.0)[0].sum().backward()
    assert operands[frozen].grad is None
    torch.testing.assert_close(operands[1 - frozen].grad, expected[0])


@both_ways
def test_half_precision_operands_are_widened_before_the_softmax(compute):
    operands = example(dtype=torch.bfloat16)
    logprobs, entropies = compute(*operands, 0.7)
    assert logprobs.dtype == entropies.dtype == torch.float32
    tolerance = 1e-5 if compute is by_head else 0.1  # logits that exist are bfloat16 themselves
    assert logprobs.tolist() == pytest.approx(oracle(*operands, 0.7)[0], abs=tolerance)
    (logprobs.sum() + entropies.sum()).backward()
    wide = [leaf.detach().double().requires_grad_() for leaf in operands[:2]]
    expected = torch.autograd.grad(sum(part.sum() for part in from_logits(*wide, None, operands[3], 0.7)), wide)
    for leaf, gradient in zip(operands, expected, strict=False):
        assert leaf.grad.dtype == torch.bfloat16
        torch.testing.assert_close(leaf.grad.double(), gradient, rtol=0.05, atol=0.1)


def test_autocast_rounds_the_operands_and_nothing_after_them():
    hidden, weight, _, targets = example(dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logprobs, _ = by_head(hidden, weight, None, targets, 0.7)
    expected, _ = oracle(hidden.bfloat16(), weight.bfloat16(), None, targets, 0.7)
    assert logprobs.tolist() == pytest.approx(expected, abs=1e-5)
    logprobs.sum().backward()
    assert weight.grad.dtype == torch.float32
    assert weight.grad.any()


@pytest.mark.parametrize("far", [1e4, -1e4])
def test_huge_logits_overflow_nothing(far):
    hidden, weight = torch.ones(1, 1, requires_grad=True), torch.tensor([[far], [0.0]], requires_grad=True)
    logprobs, entropies = by_head(hidden, weight, None, torch.tensor([0]), 1.0)
    assert logprobs.item() == pytest.approx(min(far, 0.0))
    assert entropies.item() == pytest.approx(0.0, abs=1e-6)
    (logprobs + entropies).sum().backward()
    assert weight.grad.isfinite().all()


@both_ways
def test_no_positions_give_empty_results_that_still_run_a_backward_pass(compute):
    operands = example(n=0)
    logprobs, entropies = compute(*operands, 0.7)
    assert logprobs.shape == entropies.shape == (0,)
    (logprobs.sum() + entropies.sum()).backward()
    assert torch.equal(operands[1].grad, torch.zeros(V, H, dtype=torch.float64))
    assert operands[0].grad.shape == (0, H)


@both_ways
def test_without_gradients_nothing_is_kept(compute):
    operands = example()
    with torch.no_grad():
        logprobs, entropies = compute(*operands, 0.7)
    assert logprobs.grad_fn is None
    assert entropies.grad_fn is None
    assert logprobs.tolist() == pytest.approx(oracle(*operands, 0.7)[0])


@both_ways
def test_parity_with_recorded_values_fails_under_a_shift_of_one_token(compute):
    hidden, weight, _, targets = example(n=20)
    recorded = torch.tensor(oracle(hidden, weight, None, targets, 1.0)[0], dtype=torch.float64)
    assert (compute(hidden, weight, None, targets, 1.0)[0] - recorded).abs().max() < 1e-12
    shifted, _ = compute(hidden[:-1], weight, None, targets[1:], 1.0)
    assert (shifted - recorded[1:]).abs().max() > 0.1


class Peak(torch.utils._python_dispatch.TorchDispatchMode):
    """Remembers the largest tensor that any operation gives."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(tensor, torch.Tensor):
                self.numel = max(self.numel, tensor.numel())
        return result


def test_the_full_logits_never_exist():
    hidden, weight = torch.randn(64, 2, requires_grad=True), torch.randn(50, 2, requires_grad=True)
    targets = torch.randint(50, (64,))
    with Peak() as peak:
        sum(part.sum() for part in by_head(hidden, weight, None, targets, 0.7, chunk_size=8)).backward()
    assert peak.numel == 8 * 50


@pytest.mark.timeout(150)
def test_a_head_sharded_over_two_ranks_gives_the_values_and_gradients_of_the_whole_one(tmp_path):
    command = [sys.executable, str(Path(__file__).parent / "sharded_head.py"), str(tmp_path / "store")]
    ranks = [subprocess.Popen([*command, str(rank)], stderr=subprocess.PIPE, text=True) for rank in range(2)]
    said = [rank.communicate(timeout=100)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], said
