"""The task: the value of an expression of three small integers and two operators, one tool call an operation."""

import itertools
import random
from typing import Any

OPERATORS = {"+": int.__add__, "-": int.__sub__, "*": int.__mul__}
NUMBERS = range(1, 10)
HELD_OUT = 128

Expression = tuple[int, str, int, str, int]


def expressions(seed: int) -> tuple[list[Expression], list[Expression]]:
    """Every expression, shuffled by `seed`: those to train on, and `HELD_OUT` that neither stage ever trains on."""
    every = list(itertools.product(NUMBERS, OPERATORS, NUMBERS, OPERATORS, NUMBERS))
    random.Random(seed).shuffle(every)
    return every[HELD_OUT:], every[:HELD_OUT]


def question(expression: Expression) -> str:
    """What the user asks."""
    a, first, b, second, c = expression
    return f"What is ({a} {first} {b}) {second} {c}?"


def partial_value(expression: Expression) -> int:
    """The value of the inner operation."""
    a, first, b, _, _ = expression
    return OPERATORS[first](a, b)


def value(expression: Expression) -> int:
    """The value of the whole expression."""
    return OPERATORS[expression[3]](partial_value(expression), expression[4])


def row(expression: Expression) -> dict[str, Any]:
    """The task row that the agent is given."""
    return {"prompt": question(expression), "label": str(value(expression))}
