"""Log-probs out of chunks of the head against all logits at once: `python -m benchmarks.logprob_memory`.

Forward and backward pass over 8,192 tokens and a vocabulary of 151,936 in float32, each variant in a process of its
own, all in turn, `NUM_ROUNDS` times. One JSON line: of each variant, the peak of memory and the time over those of the
plain one in the same round, the median of the rounds; the largest difference of its gradients to the plain one's, and
the norm of the difference over that of the gradient. The plain one takes 15 GB. It is the less exact one, too: against
float64, the float32 log-softmax of a CPU over so many tokens is off by 2e-5, the chunked log-probs by 5e-6.
"""

import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

PLAIN, OTHERS = "plain", ("chunked", "chunked_with_entropy", "library")
NUM_ROUNDS = 2
NEEDED_GB = 17
Figures = dict[str, float]


def main() -> None:
    """Measure, and print the comparison."""
    if _available_gb() < NEEDED_GB:
        raise SystemExit(
            f"{_available_gb():.1f} GB of memory are available, {NEEDED_GB} are needed: end something first"
        )
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        rounds = [{name: _measure(name, folder) for name in (*OTHERS, PLAIN)} for _ in range(NUM_ROUNDS)]
        found: dict[str, Any] = {name: _compare(name, rounds, folder) for name in OTHERS}
    plain = {figure: statistics.median(each[PLAIN][figure] for each in rounds) for figure in rounds[0][PLAIN]}
    found[PLAIN] = {"peak_gb": round(plain["peak"] / 1e9, 2), "seconds": round(plain["seconds"], 2)}
    print(json.dumps({"benchmark": "logprob_memory", **found}))


def _measure(name: str, folder: Path) -> Figures:
    command = [sys.executable, "-m", "benchmarks.logprob_memory.variant", name, str(folder / name)]
    return json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)


def _compare(name: str, rounds: list[dict[str, Figures]], folder: Path) -> Figures:
    """The figures of `name` over those of the plain variant."""
    import torch  # here: what this process held at a fork would count as the peak of the other

    def over_plain(figure: str) -> float:
        return round(statistics.median(each[name][figure] / each[PLAIN][figure] for each in rounds), 3)

    own, plain = torch.load(folder / name), torch.load(folder / PLAIN)
    pairs = list(zip(own[1:], plain[1:], strict=True))
    return {
        "peak": over_plain("peak"),
        "time": over_plain("seconds"),
        "cpu_time": over_plain("cpu_seconds"),
        "gradient_difference": max((a - b).abs().max().item() for a, b in pairs),
        "relative_gradient_difference": max(((a - b).norm() / b.norm()).item() for a, b in pairs),
        "logprob_difference": (own[0] - plain[0]).abs().max().item(),
    }


def _available_gb() -> float:
    lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    kilobytes = next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))
    return kilobytes * 1024 / 1e9


if __name__ == "__main__":
    main()
