"""For the tests of agents: a model and a trainer that follow a script, on loopback, in the current event loop.

    async with ScriptedModel([ScriptedReply(tool_calls=(ToolCall("add", {"a": 1, "b": 2}),)), "3"]) as model:
        async with ScriptedLeases([{"prompt": "1 + 2 =", "label": "3"}], session=model.session()) as leases:
            await Worker(load_runner("agent.py"), leases.api(), concurrency=1, drain_s=1.0).run()
    assert leases.results[0].report.reward == 1.0
    assert model.requests[1].body["messages"][-1]["role"] == "tool"

Without a trainer, `ScriptedModel.lease` makes a lease for `molt.agents.rollout.run_lease`.
"""

from molt.agents.testing.leases import LeaseResult, ScriptedLeases
from molt.agents.testing.model import ModelRequest, ScriptedModel, ScriptedReply, ToolCall

__all__ = ["LeaseResult", "ModelRequest", "ScriptedLeases", "ScriptedModel", "ScriptedReply", "ToolCall"]
