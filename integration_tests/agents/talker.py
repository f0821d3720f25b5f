"""Two turns about nothing, rewarded for how much was said: a policy of random weights gets all kinds of rewards."""

from grading import grade
from molt.agents import ChatAgent, ChatAgentRunner, Result
from openai import AsyncOpenAI


class Talker(ChatAgent):
    async def run(self, ctx):
        client = AsyncOpenAI(base_url=ctx.base_url, api_key=ctx.api_key)
        messages, said = list(ctx.messages), ""
        for follow_up in ("Are you sure?", None):
            response = await client.chat.completions.create(model=ctx.model_name, messages=messages)
            message = response.choices[0].message
            said += message.content or ""
            messages.append(message.model_dump(exclude_none=True))
            if follow_up:
                messages.append({"role": "user", "content": follow_up})
        return Result(reward=grade(said, "What do you say to this?"))


class AgentRunner(ChatAgentRunner):
    def __init__(self):
        super().__init__(Talker)
