"""Length-aware assignment of rows to ranks, so that no rank waits long for another."""

import heapq
from collections.abc import Sequence


def assign(num_tokens: Sequence[int], num_ranks: int) -> list[list[int]]:
    """Longest processing time first: the longest row left goes to the rank with the fewest tokens.

    Deterministic: equal lengths go in the order given, equal loads to the lower rank. The fullest rank has at most 4/3
    of the best possible maximum (Graham 1969).

    Args:
        num_tokens: Tokens of each row.
        num_ranks: Ranks, at least 1.

    Returns:
        For each rank the indices of its rows, longest first; every row is on exactly one rank.
    """
    ranks: list[list[int]] = [[] for _ in range(num_ranks)]
    loads = [(0, rank) for rank in range(num_ranks)]
    for row in sorted(range(len(num_tokens)), key=lambda i: -num_tokens[i]):
        load, rank = heapq.heappop(loads)
        ranks[rank].append(row)
        heapq.heappush(loads, (load + num_tokens[row], rank))
    return ranks
