"""Rows to ranks, equally many and equally expensive, so that no rank waits long for another."""

import heapq
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass


def row_cost(num_tokens: int, *, hidden_size: int = 4096) -> int:
    """What a row costs a transformer, up to a factor: 6 * hidden_size * tokens + tokens ** 2.

    The layers' matrices take time in proportion to the tokens, attention in proportion to their square. The factor is
    that of a layer of 12 * hidden_size ** 2 weights, 24 * hidden_size ** 2 operations a token, whose attention takes
    4 * hidden_size * tokens operations a token, what is masked included.
    """
    return 6 * hidden_size * num_tokens + num_tokens * num_tokens


@dataclass
class _Share:
    """What one rank is given."""

    load: int
    rows: list[int]


def assign(costs: Sequence[int], num_ranks: int) -> list[list[int]]:
    """Karmarkar and Karp's largest differencing method with equal counts, and swaps of rows afterwards.

    Rows are taken in order of cost, `num_ranks` at a time, as partial solutions with one row a rank; the two solutions
    with the widest spread are joined, heavy shares with light ones, until one is left (Karmarkar and Karp 1982;
    balanced as in Yakir 1996). Then rows are swapped out of the heaviest share for as long as that makes it lighter:
    with equal counts, differencing alone leaves the share of one very long row too heavy. Deterministic.

    Args:
        costs: Cost of each row, as `row_cost` gives it.
        num_ranks: Ranks, at least 1.

    Returns:
        For each rank the indices of its rows, most expensive first; every row is on exactly one rank, and the numbers
        of rows on two ranks differ by at most 1. Heavier shares come first.
    """
    shares = _differencing(costs, num_ranks)
    _swap(shares, costs)
    for share in shares:
        share.rows.sort(key=lambda i: (-costs[i], i))
    shares.sort(key=lambda share: (-share.load, share.rows))
    return [share.rows for share in shares]


def _differencing(costs: Sequence[int], num_ranks: int) -> list[_Share]:
    order = sorted(range(len(costs)), key=lambda i: -costs[i])
    solutions: list[tuple[int, int, list[_Share]]] = []
    for start in range(0, max(1, len(order)), num_ranks):
        shares = [_Share(costs[i], [i]) for i in order[start : start + num_ranks]]
        shares += [_Share(0, []) for _ in range(num_ranks - len(shares))]  # of the last solution only
        solutions.append(_ranked(shares, start))
    heapq.heapify(solutions)
    while len(solutions) > 1:
        _, serial, wide = heapq.heappop(solutions)
        _, _, narrow = heapq.heappop(solutions)
        joined = [
            _Share(heavy.load + light.load, heavy.rows + light.rows)
            for heavy, light in zip(wide, reversed(narrow), strict=True)
        ]
        heapq.heappush(solutions, _ranked(joined, serial))
    return solutions[0][2]


def _ranked(shares: list[_Share], serial: int) -> tuple[int, int, list[_Share]]:
    """A heap entry, widest spread first; `serial` is unique and settles ties."""
    shares = sorted(shares, key=lambda share: -share.load)
    return shares[-1].load - shares[0].load, serial, shares


def _swap(shares: list[_Share], costs: Sequence[int]) -> None:
    """Swap rows of the heaviest share with another's while that makes the heavier of the two lighter."""
    for share in shares:
        share.rows.sort(key=lambda i: costs[i])
    while True:
        heaviest, *others = sorted(shares, key=lambda share: -share.load)
        for other in reversed(others):
            swap = _best_swap(heaviest, other, costs)
            if swap is not None:
                i, j = swap
                difference = costs[heaviest.rows[i]] - costs[other.rows[j]]
                heaviest.rows[i], other.rows[j] = other.rows[j], heaviest.rows[i]
                heaviest.load -= difference
                other.load += difference
                for share in (heaviest, other):
                    share.rows.sort(key=lambda row: costs[row])
                break
        else:
            return


def _best_swap(heavy: _Share, light: _Share, costs: Sequence[int]) -> tuple[int, int] | None:
    """Positions in the two shares whose swap brings the loads closest together; None when none brings them closer."""
    gap = heavy.load - light.load
    light_costs = [costs[row] for row in light.rows]
    best: tuple[int, int, int] | None = None
    for i, row in enumerate(heavy.rows):
        # Half the gap would make them equal: the best partner is one of the two around it.
        nearest = bisect_left(light_costs, costs[row] - gap // 2)
        for j in range(max(0, nearest - 1), min(nearest + 1, len(light_costs))):
            difference = costs[row] - light_costs[j]
            if 0 < difference < gap:
                candidate = (abs(gap - 2 * difference), i, j)
                best = candidate if best is None else min(best, candidate)
    return None if best is None else best[1:]
