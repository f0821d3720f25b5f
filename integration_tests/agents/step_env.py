from grading import grade
from molt.agents import Env, Result, StepEnvRunner


class MathEnv(Env):
    async def step(self, state):
        reward = grade(state["action_text"], state["label"])
        return Result(reward=reward, terminated=True)


class AgentRunner(StepEnvRunner):
    def __init__(self):
        super().__init__(MathEnv)
