"""A plain agent on nothing but the standard library: starts fast, and blocks."""

import json
from urllib.request import Request, urlopen

from molt.agents import ChatAgent, ChatAgentRunner, Result


class PlainAgent(ChatAgent):
    def run(self, ctx):
        body = json.dumps({"model": ctx.model_name, "messages": ctx.messages}).encode()
        headers = {"authorization": f"Bearer {ctx.api_key}", "content-type": "application/json"}
        with urlopen(Request(f"{ctx.base_url}/chat/completions", body, headers)) as response:
            text = json.load(response)["choices"][0]["message"]["content"]
        if text == "crash":
            raise ValueError("as asked")
        return Result(float(text == ctx.label))


class AgentRunner(ChatAgentRunner):
    def __init__(self):
        super().__init__(PlainAgent)
