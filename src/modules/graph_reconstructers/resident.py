"""Stage 3 in a device's memory: a tick of `TokenReconstructor` as work of fixed shapes, in memory that is reused.

Every node of every agent is encoded and every node but the agent itself is predicted, seen or not, and masks choose
what is used. So nothing depends on how many nodes are missing, no value is read by the host, and a CUDA graph can hold
the tick. Guesses are those of `TokenReconstructor` up to the rounding of sums, whose order depends on sizes.

Shapes: B slots, n agents, N nodes, F = B·n frames.
"""

from __future__ import annotations

import torch
from torch import Tensor

from omagd.modules.graph_reconstructers.frozen import FrozenPredictor
from omagd.modules.graph_reconstructers.history import SlotHistory
from omagd.modules.graph_reconstructers.token_reconstructor import TokenReconstructor
from omagd.utils.errors import UserError

FLOATS_AT_ONCE = 1 << 26
"""Floats of the widest layer that a GPU computes together: a part of its memory, and few launches."""


class StaticHistory(SlotHistory):
    """`SlotHistory` whose memory stays where it is; only slots that are active move on."""

    def reset(self, which: Tensor) -> None:
        """Forget the slots `which` [B] bool."""
        slots = which.view(-1, 1, 1)
        for kept, blank in ((self.past, self._specials.pad), (self.last_ids, self._specials.pad), (self.last_step, -1)):
            kept.masked_fill_(slots, blank)

    def advance(self, ids: Tensor, active: Tensor) -> None:
        """Add the tokens [B, n, N] of this step in the slots `active` [B] bool, as `push` does in all."""
        moved = torch.cat([self.past[1:], ids.unsqueeze(0)])
        self.past.copy_(torch.where(active.view(-1, 1, 1), moved, self.past))

    def note(self, step: Tensor, active: Tensor) -> None:
        """Record the tokens as last seen at `step` [B] in the slots `active` [B] bool, as `commit` does in all."""
        now = self.past[-1]
        seen = (now < self._specials.n_codes) & active.view(-1, 1, 1)
        self.last_ids.copy_(torch.where(seen, now, self.last_ids))
        self.last_step.copy_(torch.where(seen, step.view(-1, 1, 1), self.last_step))


class ResidentReconstruction:
    """Reconstructs what the agents of B slots do not see.

    Args:
        reconstructor: its weights; nothing else of it changes. n_slots: B.

    Attributes:
        stored: [B, ...] the field of the last tick, as of `Reconstruction.fields`.

    Errors: UserError for a predictor with a forward of its own, whose work has no fixed shapes.
    """

    def __init__(self, reconstructor: TokenReconstructor, n_slots: int) -> None:
        self._of, (self._tokenizer, predictor) = reconstructor, reconstructor.frozen()
        if not isinstance(predictor, FrozenPredictor):
            kind = type(reconstructor.predictor).__name__
            raise UserError(
                f"runner=resident: cannot act with a forward of its own, as the predictor {kind} or a part of it has."
                " Use runner=parallel"
            )
        self._predictor = predictor
        self.field, device = reconstructor.field, reconstructor.device
        shape = n_slots, reconstructor.n_agents, reconstructor.layout.n_nodes
        frames, n_nodes = n_slots * shape[1], shape[2]
        specials = reconstructor.predictor.specials
        self._mask, self._specials = specials.mask, specials
        self._history = StaticHistory(shape, reconstructor.predictor.config, specials, device)
        self.stored = reconstructor.blank(shape).clone()
        self._everyone = torch.arange(frames, device=device)
        widest = max(self._predictor.static.shape[1], n_nodes * (specials.n_codes + 1))
        at_once = self._predictor.group if device.type == "cpu" else max(1, FLOATS_AT_ONCE // widest)
        self._groups = [slice(first, first + at_once) for first in range(0, frames, at_once)]

    @property
    def is_current(self) -> bool:
        """Whether the weights are still those of the construction."""
        return self._of.frozen() == (self._tokenizer, self._predictor)

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
        nodes = columns.nodes(obs).flatten(0, 1)
        codes = torch.cat([self._tokenizer(nodes[group].flatten(0, 1)) for group in self._groups])
        self._history.advance(torch.where(seen, codes.view(seen.shape), self._mask), active)
        self.stored.copy_(self._guessed(missing, step))
        self._history.note(step, active)
        return self._of.filled(obs, self.stored, missing, columns), missing

    def _guessed(self, missing: Tensor, step: Tensor) -> Tensor:
        """Return the stored field [B, ...] with the guesses of the `missing` [B, n, N] nodes."""
        frames, flat = self._history.frames(self._everyone, step), missing.flatten(0, 1)
        guesses = [self._predictor.everywhere(frames[group], flat[group]) for group in self._groups]
        if not self._of.mean:
            ids = torch.cat([guess.ids.view(-1, missing.shape[-1] - 1) for guess in guesses]).to(torch.int16)
            return torch.where(missing, with_self(ids).view(missing.shape), -1).to(torch.int16)
        features = torch.cat([guess.features.half() for guess in guesses])
        nodes = with_self(features.view(len(flat), missing.shape[-1] - 1, -1)).view(*missing.shape, -1)
        return self._of.columns.obs(torch.where(missing.unsqueeze(-1), nodes, 0.0))


def with_self(others: Tensor) -> Tensor:
    """Return values [F, N, ...] of all nodes from those [F, N - 1, ...] of the others; zero for the agent itself."""
    return torch.cat([torch.zeros_like(others[:, :1]), others], dim=1)
