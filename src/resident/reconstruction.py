"""Reconstruction in a device's memory, as work of fixed shapes, so that a CUDA graph can hold a tick.

Every node of every agent is encoded, every node but the agent itself is predicted, seen or not, and masks choose what
is used. So nothing depends on how many nodes are missing, and no value is read by the host. The guesses are those of
`TokenReconstructor` up to the rounding of sums, whose order depends on sizes.

Shapes: B slots, n agents, N nodes, F = B n frames.
"""

from __future__ import annotations

import torch
from torch import Tensor

from omagd.modules.graph_reconstructers.predictor import MaskPredictor, SlotHistory
from omagd.modules.graph_reconstructers.token_reconstructor import TokenReconstructor
from omagd.utils.errors import UserError


class ResidentReconstruction:
    """Reconstructs what the agents of B slots do not see.

    Args:
        reconstructor: its weights; nothing else of it changes. n_slots: B.

    Attributes:
        stored: [B, ...] the field of the last tick, as of `Reconstruction.fields`.

    Errors: UserError for a predictor with a forward of its own, whose work has no fixed shapes.
    """

    def __init__(self, reconstructor: TokenReconstructor, n_slots: int) -> None:
        predictor = reconstructor.predictor
        if type(predictor).forward is not MaskPredictor.forward:
            kind = type(predictor).__name__
            raise UserError(f"runner=resident: cannot act with the predictor {kind}'s own forward. Use runner=parallel")
        self._of, self.field = reconstructor, reconstructor.field
        shape = n_slots, reconstructor.n_agents, reconstructor.layout.n_nodes
        self._history = SlotHistory(shape, predictor.config, predictor.specials, reconstructor.device)
        self.stored = reconstructor.blank(shape).clone()
        self._everyone = torch.arange(shape[0] * shape[1], device=reconstructor.device)

    def reset(self, which: Tensor) -> None:
        """Clear the histories of the slots `which` [B] bool, where episodes start."""
        self._history.reset(which)

    def tick(self, obs: Tensor, step: Tensor, active: Tensor) -> tuple[Tensor, Tensor]:
        """Return (obs [B, n, obs_dim] with guesses, which nodes [B, n, N] bool are guesses) at `step` [B].

        active: [B] bool, slots that have made a step. Where the others show the observation of their last one, they
            get its guesses again: what they remember of missing nodes has not changed.
        """
        columns = self._of.columns
        seen, missing = columns.sight(obs)
        tokenizer = self._of.tokenizer
        nodes = columns.nodes(obs).flatten(0, -2).split(max(1, self._of.floats_at_once // tokenizer.config.hidden_dim))
        codes = torch.cat([tokenizer.ids(part) for part in nodes])
        self._history.push(torch.where(seen, codes.view(seen.shape), self._of.predictor.specials.mask), active)
        self.stored.copy_(self._guessed(missing, step))
        self._history.commit(step, active)
        return self._of.filled(obs, self.stored, missing, columns), missing

    def _guessed(self, missing: Tensor, step: Tensor) -> Tensor:
        """Return the stored field [B, ...] with the guesses of the `missing` [B, n, N] nodes."""
        # Seen nodes are predicted too; the mask `missing` leaves these guesses out below.
        guess = self._of.guess(self._history.frames(self._everyone, step), missing.flatten(0, 1), others=True)
        size = missing.shape[-1] - 1
        if not self._of.mean:
            ids = with_self(guess.ids.view(-1, size).to(torch.int16))
            return torch.where(missing, ids.view(missing.shape), -1).to(torch.int16)
        nodes = with_self(guess.features.half().view(len(self._everyone), size, -1)).view(*missing.shape, -1)
        return self._of.columns.obs(torch.where(missing.unsqueeze(-1), nodes, 0.0))


def with_self(others: Tensor) -> Tensor:
    """Return values [F, N, ...] of all nodes from those [F, N - 1, ...] of the others; zero for the agent itself."""
    return torch.cat([torch.zeros_like(others[:, :1]), others], dim=1)
