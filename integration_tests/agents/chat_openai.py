from grading import grade
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
