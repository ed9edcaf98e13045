"""Stage 3's eyes: both frozen modules, step by step while acting; stored so that learning reads the same bits.

Shapes: B slots, n agents, N nodes, D features, S packed rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from omagd.config.env_info import EnvInfo
from omagd.config.schema import Config
from omagd.modules.graph_reconstructers.graphs import alive, nodes_to_obs, obs_to_nodes, unseen
from omagd.modules.graph_reconstructers.history import SlotHistory
from omagd.modules.graph_reconstructers.predictor import Guess, MaskPredictor
from omagd.modules.graph_reconstructers.tokenizer import Tokenizer
from omagd.utils.errors import UserError


@dataclass(frozen=True)
class Reconstruction:
    """One tick of all slots.

    Attributes:
        fields: what to store with the rows, [B, ...] by name. obs: [B, n, obs_dim] float32, seen features unchanged,
            unseen ones guessed. guessed: [B, n, N] bool, nodes that were unseen (those taken for dead included).
    """

    fields: dict[str, Tensor]
    obs: Tensor
    guessed: Tensor


def require_one_pretraining(tokenizer: Tokenizer, predictor: MaskPredictor) -> None:
    """Refuse a predictor of another tokenizer, whose codes mean other features. Errors: UserError."""
    if not torch.allclose(tokenizer.table(), predictor.table, rtol=1e-3, atol=1e-4):
        raise UserError(
            "pretrained_mask_predictor_path belongs to another tokenizer than pretrained_tokenizer_path;"
            " give the two files of one pre-training"
        )


class Reconstructor:
    """Fills in what agents do not see, from what they see and have seen alone.

    Args:
        tokenizer, predictor: trained; frozen and put into eval mode here, where they are. config: for `decode`.
        info: of an environment with a layout.

    Errors: UserError for a predictor that was trained with another tokenizer.
    """

    def __init__(self, tokenizer: Tokenizer, predictor: MaskPredictor, config: Config, info: EnvInfo) -> None:
        if info.layout is None:
            raise ValueError(f"{info.name} has no entity layout")
        self.tokenizer = tokenizer.eval().requires_grad_(False)
        self.predictor = predictor.eval().requires_grad_(False)
        self.layout, self.n_agents = info.layout, info.n_agents
        self.device = predictor.table.device
        self.mean = config.mask_predictor_config.decode == "mean"
        require_one_pretraining(tokenizer, predictor)
        self.begin(0)

    @property
    def field(self) -> str:
        """Name of the stored field: `recon` float16 [n, obs_dim] under `decode: mean`, else `tokens` int16 [n, N]."""
        return "recon" if self.mean else "tokens"

    def begin(self, n_slots: int) -> None:
        """Start with empty histories in `n_slots` slots."""
        config, specials = self.predictor.config, self.predictor.specials
        shape = (n_slots, self.n_agents, self.layout.n_nodes)
        self._history = SlotHistory(shape, config, specials, self.device)

    def reset(self, which: np.ndarray) -> None:
        """Forget the histories of the slots `which` [B] bool: episodes start there."""
        self._history.reset(torch.as_tensor(which, device=self.device))

    @torch.no_grad()
    def step(self, obs: np.ndarray | Tensor, step: np.ndarray | Tensor) -> Reconstruction:
        """Reconstruct one tick: obs [B, n, obs_dim] float32 at `step` [B] of the episodes. Called once per tick."""
        obs = torch.as_tensor(obs, device=self.device)
        now = torch.as_tensor(step, device=self.device).long()
        nodes = obs_to_nodes(obs, self.layout)
        living, hidden = alive(obs)[..., None], unseen(nodes)
        missing, seen = hidden & living, ~hidden & living
        ids = torch.full(seen.shape, self.predictor.specials.mask, device=self.device)
        ids[seen] = self.tokenizer.ids(nodes[seen])
        self._history.push(ids)
        slots, agents = torch.nonzero(missing.any(-1), as_tuple=True)
        stored = self._blank(obs, missing)
        if len(slots):
            masked = missing[slots, agents]
            guess = self.predictor.guess(self.predictor(self._history.frames(slots, agents, now), masked))
            self._store(stored, guess, missing)
        self._history.settle(now)
        return Reconstruction({self.field: stored}, *self._fill(obs, missing, stored))

    @torch.no_grad()
    def restore(self, data: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Return (reconstructed obs [..., n, obs_dim], guessed [..., n, N]), the same bits as `step` gave.

        data: `obs` and the field that `step` asked to store.
        """
        obs = data["obs"]
        missing = unseen(obs_to_nodes(obs, self.layout)) & alive(obs)[..., None]
        return self._fill(obs, missing, data[self.field])

    def snapshot(self) -> dict[str, Tensor]:
        """Return the histories of all slots."""
        return self._history.snapshot()

    def load_snapshot(self, snapshot: dict[str, Tensor]) -> None:
        """Continue from a `snapshot` of as many slots."""
        self._history.restore(snapshot)

    def _blank(self, obs: Tensor, missing: Tensor) -> Tensor:
        if self.mean:
            return torch.zeros_like(obs, dtype=torch.float16)
        return torch.full(missing.shape, -1, dtype=torch.int16, device=obs.device)

    def _store(self, stored: Tensor, guess: Guess, missing: Tensor) -> None:
        """Write the guesses [M, ...] for `missing` [B, n, N] into `stored`, in place."""
        if not self.mean:
            stored[missing] = guess.ids.to(torch.int16)
            return
        nodes = guess.features.new_zeros((*missing.shape, self.layout.node_dim))
        nodes[missing] = guess.features
        stored.copy_(nodes_to_obs(nodes, self.layout))

    def _fill(self, obs: Tensor, missing: Tensor, stored: Tensor) -> tuple[Tensor, Tensor]:
        if self.mean:
            guessed = stored.to(obs.dtype)
        else:
            table = self.predictor.table_with_absent().to(obs.device, obs.dtype)
            ids = torch.where(missing, stored.long(), self.predictor.specials.absent)
            guessed = nodes_to_obs(table[ids], self.layout)
        where = nodes_to_obs(missing[..., None].expand(*missing.shape, self.layout.node_dim), self.layout)
        return torch.where(where, guessed, obs), missing
