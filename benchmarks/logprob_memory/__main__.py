"""Log-probs out of chunks of the head against all logits at once: `python -m benchmarks.logprob_memory [--tokens N]`.

Forward and backward pass over 8,192 tokens and a vocabulary of 151,936 in float32, each variant in a process of its
own, all in turn, `NUM_ROUNDS` times. The loss is the sum of advantage times log-prob, so that gradients are of order 1.
The plain variant takes 15 GB; with fewer tokens everything shrinks but the part that the chunked ones take anyway.

One JSON line. `peak`, `time` and `cpu_time` are those of a variant over the plain one's of the same round, the median
of the rounds. `gradient_difference` is the largest difference to the plain gradient over the largest element of that
one, of hidden states and weight the larger; `gradient_norm_difference` the norm of the difference over the norm of the
gradient. `gradient_error` and `logprob_error` are against float64, on a slice of the tokens and of the vocabulary: they
say whose rounding a difference is. Log-probs are absolute, in nats. The logits are flat on purpose: at a standard
deviation of 3 instead of 1 the float32 log-softmax of torch on a CPU makes the plain gradient off by 1e-5, and that is
what would be measured, while the chunked one stays at 1e-6.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # what this process held at a fork would count as the peak of the other, so torch comes in later
    from torch import Tensor

PLAIN, OTHERS = "plain", ("chunked", "chunked_with_entropy", "library")
NUM_ROUNDS = 2
NUM_TOKENS = 8192
NEEDED_GB_BEFORE, NEEDED_GB_A_TOKEN = 1.0, 16 / 8192
Figures = dict[str, float]


def main() -> None:
    """Measure, and print the comparison."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=NUM_TOKENS, help=f"{NUM_TOKENS} where it is not given")
    num_tokens = parser.parse_args().tokens
    needed = NEEDED_GB_BEFORE + NEEDED_GB_A_TOKEN * num_tokens
    if _available_gb() < needed:
        raise SystemExit(
            f"{_available_gb():.1f} GB of memory are available, {needed:.1f} are needed: end something, or take fewer "
            "--tokens"
        )
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        rounds = [{name: _measure(name, folder, num_tokens) for name in (*OTHERS, PLAIN)} for _ in range(NUM_ROUNDS)]
        errors = _errors(folder, num_tokens)
        found: dict[str, Any] = {name: _compare(name, rounds, folder) | errors[name] for name in OTHERS}
    plain = {figure: statistics.median(each[PLAIN][figure] for each in rounds) for figure in rounds[0][PLAIN]}
    found[PLAIN] = {"peak_gb": round(plain["peak"] / 1e9, 2), "seconds": round(plain["seconds"], 2)} | errors[PLAIN]
    print(json.dumps({"benchmark": "logprob_memory", "num_tokens": num_tokens, **found}))


def _measure(name: str, folder: Path, num_tokens: int) -> Figures:
    arguments = [name, str(folder / name), str(num_tokens)]
    command = [sys.executable, "-m", "benchmarks.logprob_memory.variant", *arguments]
    return json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)


def _compare(name: str, rounds: list[dict[str, Figures]], folder: Path) -> Figures:
    """The figures of `name` over those of the plain variant, and how far its numbers are from the plain ones."""

    def over_plain(figure: str) -> float:
        return round(statistics.median(each[name][figure] / each[PLAIN][figure] for each in rounds), 3)

    (logprobs, *gradients), (plain_logprobs, *plain_gradients) = _load(folder / name), _load(folder / PLAIN)
    pairs = list(zip(gradients, plain_gradients, strict=True))
    return {
        "peak": over_plain("peak"),
        "time": over_plain("seconds"),
        "cpu_time": over_plain("cpu_seconds"),
        "gradient_difference": _relative(pairs),
        "gradient_norm_difference": max(((a - b).norm() / b.norm()).item() for a, b in pairs),
        "logprob_difference": (logprobs - plain_logprobs).abs().max().item(),
    }


def _errors(folder: Path, num_tokens: int) -> dict[str, Figures]:
    """How far each variant is from float64."""
    from benchmarks.logprob_memory.exact import exact
    from benchmarks.logprob_memory.variant import make_inputs

    reference, errors = exact(make_inputs(num_tokens)), {}
    for name in (*OTHERS, PLAIN):
        logprobs, hidden, weight = _load(folder / name)
        pairs = [
            (hidden[: len(reference.hidden_gradient)], reference.hidden_gradient),
            (weight[reference.columns], reference.weight_gradient),
        ]
        off = logprobs[: len(reference.logprobs)] - reference.logprobs
        errors[name] = {"gradient_error": _relative(pairs), "logprob_error": off.abs().max().item()}
    return errors


def _load(results: Path) -> "tuple[Tensor, Tensor, Tensor]":
    import torch

    return torch.load(results)


def _relative(pairs: "Iterable[tuple[Tensor, Tensor]]") -> float:
    """The largest difference over the largest element of the second of a pair, of the pair where that is largest."""
    return max(((a - b).abs().max() / b.abs().max()).item() for a, b in pairs)


def _available_gb() -> float:
    lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    kilobytes = next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))
    return kilobytes * 1024 / 1e9


if __name__ == "__main__":
    main()
