"""Agents and graders that block do so until all other rollouts of their worker have taken their turns."""

import asyncio
import sys
from collections import Counter
from pathlib import Path

import pytest

from molt.agents.testing import ScriptedLeases, ScriptedModel

AGENT = Path(__file__).parent / "agents" / "blocking_agent.py"
NUM_ROLLOUTS, NUM_TURNS = 8, 25


@pytest.mark.parametrize("blocking", [("grade", "run"), ("compute",)])
@pytest.mark.timeout(120)
async def test_the_turns_of_others_go_on_beside_an_agent_or_a_grader_that_blocks(blocking, tmp_path):
    row = {"prompt": "?", "folder": str(tmp_path), "num_others": NUM_ROLLOUTS, "num_turns": NUM_TURNS}
    rows = [row | {"kind": kind} for kind in [*blocking, *["turns"] * NUM_ROLLOUTS]]
    async with (
        ScriptedModel(["4"]) as model,
        ScriptedLeases(rows, session=model.session(), timeout_s=100.0) as leases,
    ):
        command = ["-m", "molt.agents", "work", str(AGENT), "--server", leases.url, "--token", leases.token]
        worker = await asyncio.create_subprocess_exec(sys.executable, *command, "--concurrency", str(len(rows)))
        try:
            assert await worker.wait() == 0
        finally:
            if worker.returncode is None:
                worker.kill()
    assert [(r.report.outcome, r.report.reward) for r in leases.results] == [("completed", 1.0)] * len(rows)
    assert Counter(r.report.answer for r in leases.results) == Counter(turns=NUM_ROLLOUTS, **dict.fromkeys(blocking, 1))
