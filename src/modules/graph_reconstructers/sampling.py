"""Random numbers by which agents draw units from their beliefs (`decode: sample`).

The numbers of a unit and an agent stay the same through an episode: what is drawn is a hypothesis that persists while
the belief does, and moves with it. New numbers at each step would average out in a recurrent agent, to what
`decode: mean` shows, and would be noise for its values.
Every number is a function of the episode's key, the agent, the node and its own number. Keys of training episodes come
from the generator of exploration, which differs between ranks and is part of checkpoints. In tests and evaluations,
which have none, they follow from the run's seed, the slot (counted over all ranks) and the number of its episode, so
that all tests draw alike.

Shapes: B slots, n agents, N nodes, M missing nodes.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from omagd.modules.graph_reconstructers.belief import Belief
from omagd.utils.dist_utils import get_rank
from omagd.utils.seeding import stream_seed, uniform

LARGEST = 2**62


class EpisodeNoise:
    """The random numbers of B slots.

    Args:
        seed: of the run. shape: (B, n, N). device: where agents act.
    """

    def __init__(self, seed: int, shape: tuple[int, int, int], device: torch.device) -> None:
        self._n_agents, self._n_nodes = shape[1:]
        first = get_rank() * shape[0]  # ranks have as many slots each
        start = [stream_seed(seed, "belief", first + slot) for slot in range(shape[0])]
        self._start = torch.tensor(start, dtype=torch.int64, device=device)
        self._key, self._number = self._start.clone(), torch.zeros_like(self._start)

    def reset(self, which: Tensor) -> None:
        """Begin episodes in the slots `which` [B] bool."""
        self._number += which
        key = (uniform(self._number, self._start) * LARGEST).long()
        self._key = torch.where(which, key, self._key)

    def renew(self, which: np.ndarray, rng: np.random.Generator) -> None:
        """Let the episodes that have begun in the slots `which` [B] bool have keys of `rng`."""
        slots = np.flatnonzero(which)
        if len(slots):
            chosen, keys = (torch.from_numpy(x).to(self._key) for x in (slots, rng.integers(LARGEST, size=len(slots))))
            self._key = self._key.index_copy(0, chosen, keys)  # perhaps made in inference mode

    def uniform(self, at: Tensor, size: int) -> Tensor:
        """Return float64 in [0, 1), [M, size], of the nodes at [M, 3] (slot, agent, node)."""
        slot, agent, node = at.unbind(1)
        first = (agent * self._n_nodes + node) * size
        numbers = first[:, None] + torch.arange(size, device=at.device)
        return uniform(numbers, self._key[slot][:, None])

    def gumbel(self, at: Tensor, size: int) -> Tensor:
        """Return float64 of the standard Gumbel distribution, [M, size].

        The largest of logits + these numbers is a draw from the softmax of the logits (Gumbel 1954).
        """
        return -(-(self.uniform(at, size).clamp(min=2.0**-53)).log()).log()

    def drawn(self, belief: Belief, at: Tensor, bounds: Tensor) -> Belief:
        """Return a draw from a `belief` without threshold about the nodes at [M, 3]: dead with `p_dead`, else normal.

        Normal numbers: Box and Muller 1958. bounds: [2, N, D], the smallest and largest features.
        """
        assert belief.spread is not None
        dead, radius, angle = self.uniform(at, 1 + 2 * belief.features.shape[1]).split(
            [1, belief.features.shape[1], belief.features.shape[1]], dim=1
        )
        normal = (-2 * (1 - radius).log()).sqrt() * (2 * math.pi * angle).cos()
        features = belief.features + belief.spread * normal.to(belief.features.dtype)
        features = features.clamp(*bounds[:, at[:, 2]])
        taken = dead[:, 0] < belief.p_dead
        return belief._replace(features=features.masked_fill(taken[:, None], 0.0), taken_for_dead=taken)

    def snapshot(self) -> dict[str, Tensor]:
        """Return what `restore` needs."""
        return {"noise_key": self._key.clone(), "noise_number": self._number.clone()}

    def restore(self, snapshot: dict[str, Tensor]) -> None:
        """Continue from a `snapshot` of as many slots."""
        self._key, self._number = (
            snapshot[name].to(self._key.device).clone() for name in ("noise_key", "noise_number")
        )


def places(missing: Tensor, slots: Tensor | None) -> Tensor:
    """Return (slot, agent, node) of the `missing` [P, n, N] nodes, [M, 3]. slots: [P], numbers; None: all in order."""
    at = torch.nonzero(missing)
    return at if slots is None else torch.cat([slots[at[:, :1]], at[:, 1:]], dim=1)
