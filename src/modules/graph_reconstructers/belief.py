"""What a predictor believes about the units that agents do not see, in one form for metrics of all kinds."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


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
