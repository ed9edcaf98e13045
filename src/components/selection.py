"""The choice of actions as a kernel, for all agents of all slots; compare `EpsilonGreedy.select`.

Shapes: B slots, n agents, A actions.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from omagd.utils.compiling import Compiler

compiler = Compiler(Path(__file__), "kernels that choose actions", "1 to 3 s", quiet=True)
LOWEST = np.float32(-np.inf)


@compiler.function
def best_of(q: np.ndarray, available: np.ndarray) -> int:
    """Return the available action with the largest value, the first of several; 0 if none is available. Both [A]."""
    best, value = 0, LOWEST
    for action in range(len(q)):
        if available[action]:
            if q[action] != q[action]:  # not a number: as NumPy's argmax
                return action
            if q[action] > value:
                best, value = action, q[action]
    return best


@compiler.function
def any_of(available: np.ndarray, uniform: float) -> int:
    """Return an available action, given a number in [0, 1); 0 if none is available. available: [A]."""
    count = 0
    for action in range(len(available)):
        count += available[action]
    left = np.int64(uniform * count)
    for action in range(len(available)):
        if available[action]:
            if left == 0:
                return action
            left -= 1
    return 0


@compiler.kernel
def choose(q: np.ndarray, available: np.ndarray, epsilon: float, drawn: np.ndarray, actions: np.ndarray) -> None:
    """Write `actions` [B, n] int64.

    Args:
        q, available: [B, n, A] float32 and bool. drawn: [2, B, n] float64, in [0, 1): an agent whose first number is
            below `epsilon` takes the action that its second number says, the others their best one.
    """
    for b in range(actions.shape[0]):
        for i in range(actions.shape[1]):
            if drawn[0, b, i] < epsilon:
                actions[b, i] = any_of(available[b, i], drawn[1, b, i])
            else:
                actions[b, i] = best_of(q[b, i], available[b, i])


def compiled() -> Any:
    """Return `choose`, compiled or loaded; None where it cannot be kept: compiling takes longer than it saves."""
    q, actions = np.zeros((1, 1, 1), np.float32), np.zeros((1, 1), np.int64)
    ready = compiler.prepare(lambda: choose(q, q > 0, 0.5, np.zeros((2, 1, 1)), actions))
    return choose if ready else None
