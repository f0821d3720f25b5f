"""Rows of a rank into microbatches whose padded size stays under a budget."""

from collections.abc import Sequence


def pack(num_tokens: Sequence[int], *, budget: int) -> list[list[int]]:
    """Group rows of like length, so that little is padded.

    Args:
        num_tokens: Tokens of each row.
        budget: Most tokens of a microbatch, padding included: its rows times its longest. A row above it has a
            microbatch to itself.

    Returns:
        Indices of the rows of each microbatch, longest first; every row is in exactly one.
    """
    microbatches: list[list[int]] = []
    capacity = 0
    for row in sorted(range(len(num_tokens)), key=lambda i: -num_tokens[i]):
        if not microbatches or len(microbatches[-1]) >= capacity:
            microbatches.append([])
            capacity = budget // num_tokens[row]
        microbatches[-1].append(row)
    return microbatches


def equalise(ranks: Sequence[list[list[int]]]) -> list[list[list[int]]]:
    """Append empty microbatches until every rank has equally many: collectives need all ranks to make equal steps."""
    most = max(len(microbatches) for microbatches in ranks)
    return [microbatches + [[] for _ in range(most - len(microbatches))] for microbatches in ranks]
