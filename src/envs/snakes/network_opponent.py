"""A frozen earlier self: a feed-forward policy in NumPy, for self-play."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from omagd.envs.snakes.board import N_ACTIONS, N_TEAM, Board
from omagd.envs.snakes.observer import Observer

_DRAWS = 16  # numbers of draws, apart from those of the random script


class NetworkOpponent:
    """Layers with ReLU between them, shared by the three snakes; the last one's outputs are values or logits.

    Args:
        name: unique among opponents. layers: (weight [out, in], bias [out]) as a torch `Linear` has them.
        observer: what it sees. sample: draw from the softmax of its outputs, else take the largest.

    Errors: ValueError where the layers do not fit together, the observation, or four actions.
    """

    def __init__(
        self, name: str, layers: Sequence[tuple[np.ndarray, np.ndarray]], observer: Observer, sample: bool = False
    ) -> None:
        self.name, self.observer, self.sample = name, observer, sample
        self.layers = [(np.array(weight, np.float32), np.array(bias, np.float32)) for weight, bias in layers]
        sizes = [observer.obs_dim, *(len(bias) for _, bias in self.layers)]
        shapes = [weight.shape for weight, _ in self.layers]
        if sizes[-1] != N_ACTIONS or shapes != list(zip(sizes[1:], sizes[:-1], strict=True)):
            raise ValueError(f"opponent {name}: layers {shapes} do not lead from {sizes[0]} features to {N_ACTIONS}")

    def __eq__(self, other: object) -> bool:
        """Whether two opponents play alike under one name: one is the other after it was saved and restored."""
        if not isinstance(other, NetworkOpponent):
            return NotImplemented
        facts = (self.name, self.observer, self.sample) == (other.name, other.observer, other.sample)
        pairs = zip(self.layers, other.layers, strict=False)
        alike = all(np.array_equal(a, b) for mine, theirs in pairs for a, b in zip(mine, theirs, strict=True))
        return facts and len(self.layers) == len(other.layers) and alike

    def __hash__(self) -> int:
        return hash(self.name)

    def act(self, board: Board, team: np.ndarray) -> np.ndarray:
        """Return actions [B, 3]."""
        hidden, _ = self.observer.look(board, team)
        for weight, bias in self.layers[:-1]:
            hidden = np.maximum(hidden @ weight.T + bias, 0)
        weight, bias = self.layers[-1]
        values = hidden @ weight.T + bias
        if self.sample:
            bits = np.stack([board.chance(_DRAWS + i) for i in range(N_TEAM * N_ACTIONS)], 1)
            uniform = ((bits >> np.uint64(11)) + np.uint64(1)) * 2.0**-53
            values = values - np.log(-np.log(uniform * (1 - 2.0**-40))).reshape(values.shape)
        return values.argmax(2)

    def snapshot(self) -> dict[str, Any]:
        """Return everything as arrays and plain values."""
        layers = [(weight.copy(), bias.copy()) for weight, bias in self.layers]
        return {"name": self.name, "layers": layers, "observer": asdict(self.observer), "sample": self.sample}

    @classmethod
    def from_snapshot(cls, snapshot: dict[str, Any]) -> NetworkOpponent:
        """Return the opponent of a `snapshot`."""
        return cls(snapshot["name"], snapshot["layers"], Observer(**snapshot["observer"]), snapshot["sample"])
