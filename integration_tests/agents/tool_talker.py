"""Three turns with a tool that is described in the system prompt, as SmolLM2's chat template has no place for tools."""

from grading import grade
from molt.agents import ChatAgent, ChatAgentRunner, Result
from openai import AsyncOpenAI

SYSTEM = """You are an expert in composing functions. You have access to this tool:
<tools>[{"name": "calculate", "description": "The value of an expression.",
"parameters": {"type": "object", "properties": {"expression": {"type": "string"}}}}]</tools>
Call it as <tool_call>[{"name": "calculate", "arguments": {"expression": "1 + 1"}}]</tool_call>"""


class ToolTalker(ChatAgent):
    async def run(self, ctx):
        client = AsyncOpenAI(base_url=ctx.base_url, api_key=ctx.api_key)
        messages, said = [{"role": "system", "content": SYSTEM}, *ctx.messages], ""
        for result in ('{"value": 84}', '{"error": "no such tool"}', None):
            response = await client.chat.completions.create(model=ctx.model_name, messages=messages)
            text = response.choices[0].message.content or ""
            said += text
            messages.append({"role": "assistant", "content": text})
            messages.append({"role": "tool", "tool_call_id": "call", "content": result})
        return Result(reward=grade(said, "84"))


class AgentRunner(ChatAgentRunner):
    def __init__(self):
        super().__init__(ToolTalker)
