"""Demonstrations for the warm start. Right ones are a minority, so that reinforcement learning has something to find.

Half of them guess the answer at once; of the others some stop one call early, some take a wrong operator. What the
policy learns from them is the form of a tool call, the copying of numbers, and every habit in its proportion.
"""

import json
import random
from typing import Any

from calculator.agent import TOOLS
from calculator.tasks import OPERATORS, Expression, question, value

GUESS_AT_ONCE = 0.5
STOP_EARLY = 0.4
WRONG_OPERATOR = 0.3


def demonstrate(expression: Expression, rng: random.Random) -> dict[str, Any]:
    """One conversation about `expression`, with the tools it may use."""
    a, first, b, second, c = expression
    messages: list[dict[str, Any]] = [{"role": "user", "content": question(expression)}]
    if rng.random() < GUESS_AT_ONCE:
        guess = value(expression) + rng.choice([-10, -3, -2, -1, 1, 2, 3, 10])
        return {"messages": [*messages, {"role": "assistant", "content": str(guess)}], "tools": TOOLS}
    operations = [(a, _mistake(first, rng), b)]
    result = _call(messages, operations[0])
    if rng.random() >= STOP_EARLY:
        result = _call(messages, (result, _mistake(second, rng), c))
    messages.append({"role": "assistant", "content": str(result)})
    return {"messages": messages, "tools": TOOLS}


def _mistake(operator: str, rng: random.Random) -> str:
    return rng.choice(list(OPERATORS)) if rng.random() < WRONG_OPERATOR else operator


def _call(messages: list[dict[str, Any]], operation: tuple[int, str, int]) -> int:
    """Append one tool call with its result; returns the result."""
    a, operator, b = operation
    arguments = json.dumps({"a": a, "operator": operator, "b": b})
    function = {"name": "calculator", "arguments": arguments}
    call = {"id": f"call_{len(messages)}", "type": "function", "function": function}
    messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
    result = OPERATORS[operator](a, b)
    messages.append({"role": "tool", "tool_call_id": call["id"], "content": str(result)})
    return result
