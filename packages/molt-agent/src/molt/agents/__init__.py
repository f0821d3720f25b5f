"""The SDK of Molt: keep the agent program, train the policy behind it.

An agent is a class with one method. It gets a context that says which model endpoint to call and what the task is,
works as it always did, and says how good the outcome was:

    from openai import AsyncOpenAI
    from molt.agents import ChatAgent, ChatAgentRunner, Result

    class MyAgent(ChatAgent):
        async def run(self, ctx):
            client = AsyncOpenAI(base_url=ctx.base_url, api_key=ctx.api_key)
            response = await client.chat.completions.create(
                model=ctx.model_name, messages=list(ctx.messages),
                max_tokens=ctx.sampling_params.max_tokens, temperature=ctx.sampling_params.temperature)
            return Result(reward=grade(response.choices[0].message.content, ctx.label))

    class AgentRunner(ChatAgentRunner):
        def __init__(self):
            super().__init__(MyAgent)

A module that exports such an `AgentRunner` runs under `molt-agent try` (any OpenAI-compatible endpoint) and under
`molt-agent work` (a trainer). `Env` with `StepEnvRunner` is the other way: there the framework calls the model and the
environment only judges. A ChatAgent that defines `grade` may return an answer from `run` instead of a Result: answers
are kept, and can be graded again. An agent that raises has `failed`; `InfrastructureError` says that the sandbox or the
network was at fault. `molt.agents.testing` has a scripted model and a scripted trainer for tests.
"""

from molt.agents.chat import ChatAgent, ChatAgentRunner
from molt.agents.context import Context
from molt.agents.env import Env, StepEnvRunner, StepState
from molt.agents.errors import (
    AgentLoadError,
    AuthenticationError,
    FencedError,
    InfrastructureError,
    InputError,
    InvalidResultError,
    MoltAgentError,
    NoGraderError,
    ServerError,
    ServerUnavailableError,
    TaskError,
)
from molt.agents.protocol import OutcomeKind, SamplingParams
from molt.agents.results import Result
from molt.agents.runner import AgentRunner

__all__ = [
    "AgentLoadError",
    "AgentRunner",
    "AuthenticationError",
    "ChatAgent",
    "ChatAgentRunner",
    "Context",
    "Env",
    "FencedError",
    "InfrastructureError",
    "InputError",
    "InvalidResultError",
    "MoltAgentError",
    "NoGraderError",
    "OutcomeKind",
    "Result",
    "SamplingParams",
    "ServerError",
    "ServerUnavailableError",
    "StepEnvRunner",
    "StepState",
    "TaskError",
]
