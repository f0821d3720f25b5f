"""A grader of answers that an agent without one gave: whether there is an even number of characters in them."""

from molt.agents import ChatAgent, ChatAgentRunner


class Graded(ChatAgent):
    async def run(self, ctx):
        raise AssertionError("a recorded rollout is not run again")

    def grade(self, ctx, answer):
        return float(len(answer) % 2 == 0)


class AgentRunner(ChatAgentRunner):
    def __init__(self):
        super().__init__(Graded)
