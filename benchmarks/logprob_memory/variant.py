"""One way to the log-probs, in a process of its own: `... .variant NAME RESULTS.pt NUM_TOKENS`.

Prints `{"peak", "seconds", "cpu_seconds"}` of a forward and a backward pass: bytes over what the process held before,
wall time, and time of its threads on the processor. The results file gets the log-probs and the gradients.
"""

import json
import resource
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from molt.train.loss.logprob import head_logprobs

VOCABULARY, HIDDEN = 151936, 64
TEMPERATURE, CHUNK = 0.7, 256
NUM_WARM_UP = 16
"""Tokens of a first pass: what the libraries set up once belongs to no variant."""


@dataclass(frozen=True)
class Inputs:
    """Leaves of the graph, targets, and how much each token counts: [N, H], [V, H], [N], [N]."""

    hidden: Tensor
    weight: Tensor
    targets: Tensor
    advantages: Tensor


def make_inputs(num_tokens: int) -> Inputs:
    """The same in every process. The logits have a standard deviation of 1, see `benchmarks.logprob_memory`."""
    generator = torch.Generator().manual_seed(0)
    return Inputs(
        hidden=torch.randn(num_tokens, HIDDEN, generator=generator),
        weight=torch.randn(VOCABULARY, HIDDEN, generator=generator) / HIDDEN**0.5,
        targets=torch.randint(VOCABULARY, (num_tokens,), generator=generator),
        advantages=torch.randn(num_tokens, generator=generator),
    )


def plain(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """All logits at once, as few copies of them as autograd allows."""
    logits = functional.linear(hidden, weight).div_(TEMPERATURE)
    return -functional.cross_entropy(logits, targets, reduction="none")


def chunked(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """What the trainer does."""
    return _by_head(hidden, weight, targets, with_entropy=False)[0]


def chunked_with_entropy(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """What the trainer does where the loss has an entropy term; of weight 0 here, so that the gradients compare."""
    logprobs, entropy = _by_head(hidden, weight, targets, with_entropy=True)
    assert entropy is not None
    return logprobs + 0.0 * entropy


def library(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """The fused operation of torch, which gives no entropy."""
    options = torch.nn.LinearCrossEntropyOptions(batch_chunk_size=CHUNK, chunking_method=None)
    scaled = hidden / TEMPERATURE
    return -functional.linear_cross_entropy(scaled, weight, targets, reduction="none", options=options)


VARIANTS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "plain": plain,
    "chunked": chunked,
    "chunked_with_entropy": chunked_with_entropy,
    "library": library,
}


def _by_head(hidden: Tensor, weight: Tensor, targets: Tensor, *, with_entropy: bool) -> tuple[Tensor, Tensor | None]:
    return head_logprobs(hidden, weight, targets, temperature=TEMPERATURE, chunk_size=CHUNK, with_entropy=with_entropy)


def main(name: str, results: Path, num_tokens: int) -> None:
    """Measure the variant `name`."""
    # Where memory runs out after all, this process goes, and no other.
    Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")
    inputs = make_inputs(num_tokens)
    hidden, weight, targets = inputs.hidden.requires_grad_(), inputs.weight.requires_grad_(), inputs.targets
    VARIANTS[name](hidden[:NUM_WARM_UP], weight, targets[:NUM_WARM_UP]).sum().backward()
    hidden.grad = weight.grad = None
    before, start, cpu_start = _resident(), time.perf_counter(), time.process_time()
    logprobs = VARIANTS[name](hidden, weight, targets)
    (logprobs * inputs.advantages).sum().backward()
    figures = {
        "peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before,
        "seconds": time.perf_counter() - start,
        "cpu_seconds": time.process_time() - cpu_start,
    }
    torch.save((logprobs.detach(), hidden.grad, weight.grad), results)
    print(json.dumps(figures))


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * resource.getpagesize()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))
