"""Agents that block, in a worker process of their own: the other rollouts' turns take as long as without them."""

import asyncio
import sys
from pathlib import Path

import pytest

from molt.agents.testing import ScriptedLeases, ScriptedModel

AGENT = Path(__file__).parent / "agents" / "mixed_agent.py"
MODEL_S = 0.2
"""How long the model takes to answer: a short reply. Much less, and the noise of a busy machine is all that is seen."""
NUM_ROLLOUTS, NUM_TURNS, NUM_FIRST = 8, 25, 2
"""The first turns of a rollout make its connection, and are left out."""
BLOCK_S = 5.0
TURNS = {"kind": "turns", "prompt": "?", "num_turns": NUM_TURNS}


class SlowModel(ScriptedModel):
    """Takes its time to answer."""

    async def handle(self, request):
        await asyncio.sleep(MODEL_S)
        return await super().handle(request)


async def turn_seconds(rows):
    """Run these rollouts in one worker process. Returns the seconds of every turn."""
    async with SlowModel(["4"]) as model, ScriptedLeases(rows, session=model.session(), timeout_s=60.0) as leases:
        command = ["-m", "molt.agents", "work", str(AGENT), "--server", leases.url, "--token", leases.token]
        worker = await asyncio.create_subprocess_exec(sys.executable, *command, "--concurrency", str(len(rows)))
        try:
            assert await worker.wait() == 0
        finally:
            if worker.returncode is None:
                worker.kill()
    assert [(r.report.outcome, r.report.reward) for r in leases.results] == [("completed", 1.0)] * len(rows)
    return [seconds for r in leases.results for seconds in r.report.answer[NUM_FIRST:]]


def p99(values):
    return sorted(values)[int(len(values) * 0.99)]


def blocking(*kinds):
    return [{"kind": kind, "prompt": "?", "seconds": BLOCK_S} for kind in kinds]


@pytest.mark.timeout(180)
async def test_blocking_agents_and_graders_do_not_delay_the_turns_of_others():
    turns = [TURNS] * NUM_ROLLOUTS
    alone = await turn_seconds(turns)
    asleep = await turn_seconds([*blocking("grade", "run"), *turns])
    computing = await turn_seconds([*blocking("compute"), *turns])
    assert len(alone) == len(asleep) == len(computing) == NUM_ROLLOUTS * (NUM_TURNS - NUM_FIRST)
    limit = 2 * p99(alone)
    assert p99(asleep) <= limit, f"p99 {p99(asleep):.3f} s beside sleepers, {p99(alone):.3f} s alone"
    assert p99(computing) <= limit, f"p99 {p99(computing):.3f} s beside one that computes, {p99(alone):.3f} s alone"
