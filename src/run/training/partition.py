"""Which rank plays which task: shares of tasks so that all ranks need about the same time.

Letters: W ranks, n tasks. Shares are [W, n], the part of each task's episodes that each rank plays; columns sum to 1.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence

import numpy as np

TOLERANCE = 0.05
"""How far the busiest rank may be above the mean before tasks are dealt again or divided, as a share of the mean."""


def in_turn(n_tasks: int, n_ranks: int, least: int = 1) -> np.ndarray:
    """Return the shares when task i goes to rank i mod W, and each rank has at least `least` tasks.

    Where there are too few, a rank plays further ones together with others.
    """
    owned = [[task for task in range(n_tasks) if task % n_ranks == rank] for rank in range(n_ranks)]
    for rank, tasks in enumerate(owned):
        spare = [task for task in np.roll(range(n_tasks), -rank).tolist() if task not in tasks]
        tasks += spare[: max(0, least - len(tasks))]
    return _equal_parts([set(tasks) for tasks in owned], n_tasks)


def balanced(loads: np.ndarray, n_ranks: int, least: int = 1) -> np.ndarray:
    """Return shares with which the busiest rank is at most `TOLERANCE` above the mean, dividing few tasks.

    Tasks are packed by largest differencing. A task that is longer than the mean of the ranks is divided among several
    first, and the longest one of the busiest rank after that, as long as it is too busy.

    Args:
        loads: [n] seconds of each task per episode of the run, all positive. n_ranks: W. least: tasks of each rank.
    """
    mean = loads.sum() / n_ranks
    parts = np.minimum(np.ceil(loads / mean * (1 - 1e-9)).astype(int), n_ranks)
    while parts.sum() < n_ranks * least:
        parts[np.where(parts < n_ranks, loads / parts, -1.0).argmax()] += 1
    while True:
        shares = _packed(loads, parts, n_ranks, least)
        busy = shares @ loads
        if busy.max() <= (1 + TOLERANCE) * mean or (parts >= n_ranks).all():
            return shares
        candidates = (shares[busy.argmax()] > 0) & (parts < n_ranks)
        if not candidates.any():
            candidates = parts < n_ranks
        parts[np.where(candidates, loads / parts, -1.0).argmax()] += 1


def _packed(loads: np.ndarray, parts: np.ndarray, n_ranks: int, least: int) -> np.ndarray:
    """Return shares when task i is divided into parts[i] equal parts, no two of them on one rank."""
    items = [(loads[task] / parts[task], task) for task in range(len(loads)) for _ in range(parts[task])]
    owned = [{items[i][1] for i in group} for group in largest_differencing([load for load, _ in items], n_ranks)]
    for task, count in enumerate(parts):  # two parts of a task may have come together: one of them goes elsewhere
        others = sorted(
            (rank for rank in range(n_ranks) if task not in owned[rank]), key=lambda r: _load(owned[r], loads)
        )
        for rank in others[: count - sum(task in own for own in owned)]:
            owned[rank].add(task)
    for own in owned:
        while len(own) < least:
            giver = max((other for other in owned if len(other) > least and other - own), key=len)
            task = min(giver - own, key=lambda task: loads[task] / parts[task])
            giver.remove(task)
            own.add(task)
    return _equal_parts(owned, len(loads))


def largest_differencing(loads: Sequence[float], n_groups: int) -> list[list[int]]:
    """Return the indices of `loads` in groups with similar sums, by the method of Karmarkar and Karp.

    Two partial solutions whose largest and smallest sums differ the most are joined, the largest group of one with the
    smallest of the other, until one solution is left (Karmarkar and Karp 1982, The differencing method of set
    partitioning; for several groups Michiels et al. 2003, Performance ratios for the differencing method).
    """
    heap: list[tuple[float, int, list[tuple[float, list[int]]]]] = []
    for i, load in enumerate(loads):
        groups: list[tuple[float, list[int]]] = [(0.0, []) for _ in range(n_groups - 1)]
        heap.append((-float(load) if n_groups > 1 else 0.0, i, [*groups, (float(load), [i])]))
    heapq.heapify(heap)
    while len(heap) > 1:
        (_, number, one), (_, _, other) = heapq.heappop(heap), heapq.heappop(heap)
        pairs = zip(one, reversed(other), strict=True)
        joined = sorted(((a + b, [*own, *more]) for (a, own), (b, more) in pairs), key=lambda group: group[0])
        heapq.heappush(heap, (joined[0][0] - joined[-1][0], number, joined))
    return [sorted(group) for _, group in heap[0][2]]


def excess(shares: np.ndarray, loads: np.ndarray) -> float:
    """Return how far the busiest rank is above the mean of the ranks, as a share of the mean."""
    busy = shares @ loads
    return float(busy.max() / busy.mean() - 1)


def apportioned(total: int, shares: Sequence[float]) -> list[int]:
    """Return whole numbers with the sum `total` in proportion to `shares`, at least 1 each (largest remainders)."""
    exact = np.asarray(shares, float) / math.fsum(shares) * total
    numbers = np.maximum(np.floor(exact), 1).astype(int)
    order = np.argsort(numbers - exact, kind="stable")
    for place in range(max(total - int(numbers.sum()), 0)):
        numbers[order[place % len(order)]] += 1
    while numbers.sum() > total and (numbers > 1).any():
        numbers[np.where(numbers > 1, numbers - exact, -np.inf).argmax()] -= 1
    return [int(number) for number in numbers]


def _load(own: set[int], loads: np.ndarray) -> float:
    return float(sum(loads[task] for task in own))


def _equal_parts(owned: Sequence[set[int]], n_tasks: int) -> np.ndarray:
    shares = np.array([[float(task in own) for task in range(n_tasks)] for own in owned])
    return shares / shares.sum(0)
