"""An agent with one tool, written against the plain OpenAI SDK.

It runs unchanged against any compatible endpoint:

molt-agent try examples/calculator/agent.py --tasks TASKS.jsonl --base-url URL --api-key KEY --model NAME
"""

import json
import ssl

from openai import AsyncOpenAI, DefaultAsyncHttpxClient

from molt.agents import ChatAgent, ChatAgentRunner, Result

MAX_TURNS = 4
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "calculator",
            "description": "One operation on two integers.",
            "parameters": {
                "type": "object",
                "properties": {
                    "a": {"type": "integer"},
                    "operator": {"type": "string", "enum": ["+", "-", "*"]},
                    "b": {"type": "integer"},
                },
                "required": ["a", "operator", "b"],
            },
        },
    }
]


# A client of its own for each rollout, without reading the machine's certificates every time, which takes 10 ms.
CERTIFICATES = ssl.create_default_context()


def calculate(arguments: str) -> str:
    """The tool: a wrong call is answered with an error that the model can read."""
    try:
        call = json.loads(arguments)
        a, operator, b = int(call["a"]), call["operator"], int(call["b"])
        return str({"+": a + b, "-": a - b, "*": a * b}[operator])
    except (ValueError, KeyError, TypeError):
        return "error"


class Calculator(ChatAgent):
    """Answers with the help of the calculator; the reward is 1 when the final message is the right number."""

    async def run(self, ctx):
        """Loop until the model answers without a tool call."""
        async with DefaultAsyncHttpxClient(verify=CERTIFICATES) as http:
            client = AsyncOpenAI(base_url=ctx.base_url, api_key=ctx.api_key, http_client=http)
            return await self.solve(ctx, client)

    async def solve(self, ctx, client):
        """The tool loop itself."""
        messages, num_calls, answer = list(ctx.messages), 0, ""
        for _ in range(MAX_TURNS):
            response = await client.chat.completions.create(
                model=ctx.model_name,
                messages=messages,
                tools=TOOLS,
                max_tokens=ctx.sampling_params.max_tokens,
                temperature=ctx.sampling_params.temperature,
            )
            message = response.choices[0].message
            messages.append(message.model_dump(exclude_none=True))
            answer = (message.content or "").strip()
            if not message.tool_calls:
                break
            for call in message.tool_calls:
                num_calls += 1
                output = calculate(call.function.arguments)
                messages.append({"role": "tool", "tool_call_id": call.id, "content": output})
        return Result(reward=float(answer == ctx.label), info={"tool_calls": num_calls})


class AgentRunner(ChatAgentRunner):
    """What a worker looks for in an agent module."""

    def __init__(self):
        super().__init__(Calculator)
