"""The calculator in a sandbox that is sometimes slow: one rollout in ten takes ten times longer than the others."""

import asyncio
import hashlib

from calculator.agent import Calculator
from molt.agents import ChatAgentRunner

ORDINARY_S = (0.4, 0.8)
"""Long beside the second of processor that an update costs: else the figure says how fast the machine is."""
SLOW_PART, TIMES_SLOWER = 0.1, 10


def sandbox_seconds(prompt: str, member: str) -> float:
    """What the sandbox of a rollout takes: drawn from its task and its place in the group, so the same in every run."""
    digest = hashlib.blake2b(f"{prompt}/{member}".encode(), digest_size=16).digest()
    which, where = (int.from_bytes(part) / 2**64 for part in (digest[:8], digest[8:]))
    shortest, longest = ORDINARY_S
    seconds = shortest + where * (longest - shortest)
    return seconds * (TIMES_SLOWER if which < SLOW_PART else 1)


class SandboxedCalculator(Calculator):
    """Half of the time goes by before the first model call, half after the last one."""

    async def run(self, ctx):
        """Start the sandbox, solve the task as usual, and stop the sandbox."""
        seconds = sandbox_seconds(ctx.prompt, ctx.rollout_id.rpartition(".")[2])
        await asyncio.sleep(seconds / 2)
        result = await super().run(ctx)
        await asyncio.sleep(seconds / 2)
        return result


class AgentRunner(ChatAgentRunner):
    """What a worker looks for in an agent module."""

    def __init__(self):
        super().__init__(SandboxedCalculator)
