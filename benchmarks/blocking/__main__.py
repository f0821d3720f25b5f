"""Whether agents and graders that block delay the others in their worker: `python -m benchmarks.blocking`.

One worker process runs rollouts that take turns with a model of 200 ms: by themselves, beside an agent and a grader
that sleep for five seconds, and beside an agent that computes for five. One JSON line has the seconds of a turn, median
and 99th percentile, and the ratios of the latter.
"""

import asyncio
import json
import statistics
import sys
from pathlib import Path
from typing import Any

from molt.agents.testing import ScriptedLeases, ScriptedModel

AGENT = Path(__file__).parent / "agent.py"
MODEL_S = 0.2
BLOCK_S = 5.0
NUM_ROLLOUTS, NUM_TURNS, NUM_FIRST = 8, 25, 2
"""The first turns of a rollout make its connection, and are left out."""
ARMS = {"alone": (), "asleep": ("grade", "run"), "computing": ("compute",)}


class SlowModel(ScriptedModel):
    """Takes its time to answer."""

    async def handle(self, request: Any) -> Any:
        """Answer a request."""
        await asyncio.sleep(MODEL_S)
        return await super().handle(request)


def main() -> None:
    """Measure all arms and print the comparison."""
    seconds = {arm: asyncio.run(turn_seconds(kinds)) for arm, kinds in ARMS.items()}
    p99 = {arm: statistics.quantiles(values, n=100)[-1] for arm, values in seconds.items()}
    result = {
        "benchmark": "blocking",
        "median_s": {arm: round(statistics.median(values), 3) for arm, values in seconds.items()},
        "p99_s": {arm: round(value, 3) for arm, value in p99.items()},
        "p99_ratio": {arm: round(p99[arm] / p99["alone"], 3) for arm in ("asleep", "computing")},
    }
    print(json.dumps(result))


async def turn_seconds(blocking: tuple[str, ...]) -> list[float]:
    """Run the rollouts in one worker process, beside others that block. Returns the seconds of every turn."""
    rows = [{"kind": kind, "prompt": "?", "seconds": BLOCK_S} for kind in blocking]
    rows += [{"kind": "turns", "prompt": "?", "num_turns": NUM_TURNS}] * NUM_ROLLOUTS
    async with SlowModel(["4"]) as model, ScriptedLeases(rows, session=model.session(), timeout_s=60.0) as leases:
        command = ["-m", "molt.agents", "work", str(AGENT), "--server", leases.url, "--token", leases.token]
        worker = await asyncio.create_subprocess_exec(sys.executable, *command, "--concurrency", str(len(rows)))
        assert await worker.wait() == 0
    answers = [result.report.answer for result in leases.results]
    return [seconds for answer in answers for seconds in answer[NUM_FIRST:]]


if __name__ == "__main__":
    main()
