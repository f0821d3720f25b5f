"""Rows of a rank into microbatches whose size stays under a budget."""

from collections.abc import Sequence
from typing import Literal

Layout = Literal["padded", "packed"]

PADDING_SHARE = 20
"""A padded microbatch has at most this part of the budget in padding: a microbatch more costs about as much."""


def pack(num_tokens: Sequence[int], *, budget: int, layout: Layout) -> list[list[int]]:
    """Group the rows of one rank. Deterministic: equal lengths stay in the order given.

    Args:
        num_tokens: Tokens of each row, above 0.
        budget: Most tokens of a microbatch: of its rows together where they are `packed` end to end, its rows times its
            longest where they are `padded`. A row above it has a microbatch to itself.
        layout: How the rows of a microbatch lie.

    Returns:
        Indices of the rows of each microbatch, longest first; every row is in exactly one.
    """
    order = sorted(range(len(num_tokens)), key=lambda i: -num_tokens[i])
    return (_first_fit if layout == "packed" else _like_lengths)(order, num_tokens, budget)


def equalise(ranks: Sequence[list[list[int]]]) -> list[list[list[int]]]:
    """Append empty microbatches until every rank has equally many: collectives need all ranks to make equal steps."""
    most = max(len(microbatches) for microbatches in ranks)
    return [microbatches + [[] for _ in range(most - len(microbatches))] for microbatches in ranks]


def _first_fit(order: Sequence[int], num_tokens: Sequence[int], budget: int) -> list[list[int]]:
    """First fit decreasing: each row goes to the first microbatch that has room."""
    microbatches: list[list[int]] = []
    room: list[int] = []
    for row in order:
        fitting = next((m for m, left in enumerate(room) if left >= num_tokens[row]), None)
        if fitting is None:
            microbatches.append([row])
            room.append(budget - num_tokens[row])
        else:
            microbatches[fitting].append(row)
            room[fitting] -= num_tokens[row]
    return microbatches


def _like_lengths(order: Sequence[int], num_tokens: Sequence[int], budget: int) -> list[list[int]]:
    """Neighbours in length share a microbatch, as long as little of it is padding."""
    microbatches: list[list[int]] = []
    longest = padding = 0
    for row in order:
        more = padding + longest - num_tokens[row]
        if microbatches and (len(microbatches[-1]) + 1) * longest <= budget and more <= budget // PADDING_SHARE:
            microbatches[-1].append(row)
            padding = more
        else:
            microbatches.append([row])
            longest, padding = num_tokens[row], 0
    return microbatches
