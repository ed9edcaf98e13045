"""What a predictor believes about the units that agents do not see, in one form for metrics of all kinds.

Also what agents read of it (`belief_inputs`), the columns of the stored field `belief`, float16 [n, N, 4]:

- spread: the standard deviation of the position if the unit lives, the root mean square of x and y in sight ranges;
- age: tanh(steps since the last sight / 8), 0 if never seen;
- never: 1 if never seen;
- alive: the probability that the unit lives.

A unit that is seen now, and the agent itself, has (0, 0, 0, 1); a dead observer has zeros.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

FIELD = "belief"
WIDTH = 4
SPREAD, AGE, NEVER, ALIVE = range(WIDTH)
AGE_SCALE = 8  # steps: an age of as many is 0.76


class Belief(NamedTuple):
    """Beliefs about M missing nodes (unseen, not the agent itself, of a living observer).

    They are in the order of `torch.nonzero(missing)` over missing [S, n, N].

    Attributes:
        features: [M, D] float32 as the agent receives them, zero where taken for dead. p_dead: [M], in [0, 1].
            taken_for_dead: [M] bool. spread: [M, D], predicted standard deviation, or None.
    """

    features: Tensor
    p_dead: Tensor
    taken_for_dead: Tensor
    spread: Tensor | None


class Doubt(NamedTuple):
    """Of M missing nodes: p_dead [M]; spread [M] of the position if alive, in sight ranges."""

    p_dead: Tensor
    spread: Tensor


def nothing(like: Tensor) -> Doubt:
    """Return the doubts about no node."""
    return Doubt(like.new_zeros(0), like.new_zeros(0))


def known(alive: Tensor) -> Tensor:
    """Return the field `belief` [..., n, N, 4] of units that are seen, or known to be dead: alive [..., n, N] bool."""
    out = torch.zeros((*alive.shape, WIDTH), dtype=torch.float16, device=alive.device)
    out[..., ALIVE] = alive.half()
    return out


def input_columns(seen: Tensor, missing: Tensor, age: Tensor, doubt: Doubt) -> Tensor:
    """Return the field `belief` [..., n, N, 4] at the top of this file.

    seen, missing: [..., n, N] bool. age: [..., n, N] int64, steps since the last sight, -1: never; read where missing.
    doubt: of the missing nodes in their order.
    """
    out = known(seen)
    past = age[missing]
    columns = [doubt.spread, (past.clamp(min=0) / AGE_SCALE).tanh(), past < 0, 1 - doubt.p_dead]
    out[missing] = torch.stack([column.to(out.dtype) for column in columns], dim=-1)
    return out
