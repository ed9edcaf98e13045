"""Stage 3 with `kind: masked`: reconstructs with the frozen tokenizer and predictor, step by step while acting.

At each step: tokens of the seen nodes, MASK for the others, predict, decode, and write the decoded features only where
nothing was seen. The modules that act are those that were trained, in eval mode.

Shapes: B slots, n agents, R = B·n rows, N nodes, D features, F frames with a missing node, M missing nodes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from omagd.config.env_info import EnvInfo
from omagd.config.schema import Config
from omagd.modules.graph_reconstructers.graphs import GraphTables
from omagd.modules.graph_reconstructers.predictor import Frames, Guess, MaskPredictor, SlotHistory
from omagd.modules.graph_reconstructers.pretrained import require_one_pretraining
from omagd.modules.graph_reconstructers.reconstructor import Reconstruction, Reconstructor
from omagd.modules.graph_reconstructers.tokenizer import Tokenizer
from omagd.modules.ops import autocast_bf16

if TYPE_CHECKING:
    from omagd.components.episode_codec import Spec

FLOATS_AT_ONCE = 1 << 21, 1 << 26
"""Floats of the widest layer that pass together: few enough for a CPU's cache; for a GPU's memory, and few launches."""


class TokenReconstructor(Reconstructor):
    """Predicts what agents do not see, from what they see and have seen.

    Missing nodes of all slots and agents are predicted in one call. The last bits of a prediction depend on what else
    is predicted in the same step (the order of sums depends on sizes), and on nothing else. Storing the result makes
    learning independent of that.

    Args:
        tokenizer, predictor: trained; they are frozen and put into eval mode in place. config: for `decode`,
            `acting_precision`. info: of an environment with a layout.

    Attributes:
        field: `recon` under `decode: mean`, else `tokens`.

    Errors: UserError for a predictor that was trained with another tokenizer.
    """

    shape_keys = (
        "kind", "d_model", "n_layers", "n_heads", "feedforward_dim", "stacked_steps", "stacked_strip", "use_gru",
        "last_seen", "code_features",
    )  # fmt: skip

    def __init__(self, tokenizer: Tokenizer, predictor: MaskPredictor, config: Config, info: EnvInfo) -> None:
        assert info.layout is not None
        super().__init__(info.layout, predictor.table.device)
        self.tokenizer, self.predictor = tokenizer.requires_grad_(False), predictor.requires_grad_(False)
        self.mean = config.mask_predictor_config.decode == "mean"
        self.field = "recon" if self.mean else "tokens"
        self.n_agents, self.floats_at_once = info.n_agents, FLOATS_AT_ONCE[self.device.type != "cpu"]
        require_one_pretraining(tokenizer, predictor)
        self._bf16 = config.acting_precision == "bf16"
        self.begin(0)

    @classmethod
    def new_predictor(cls, config: Config, info: EnvInfo) -> MaskPredictor:
        """Return an untrained predictor."""
        assert info.layout is not None
        n_codes = config.tokenizer_config.n_codes
        return MaskPredictor(config.mask_predictor_config, n_codes, info.layout, info.episode_limit)

    @classmethod
    def fields(cls, config: Config, info: EnvInfo) -> Spec:
        """Return the stored fields: `recon` float16 [n, obs_dim] under `decode: mean`, else `tokens` int16 [n, N]."""
        if config.mask_predictor_config.decode == "mean":
            return super().fields(config, info)
        assert info.layout is not None
        return {"tokens": (torch.int16, (info.n_agents, info.layout.n_nodes))}

    def begin(self, n_slots: int) -> None:
        """Start with empty histories in `n_slots` slots, and in eval mode: training may have switched dropout on."""
        self.tokenizer.eval()
        self.predictor.eval()
        shape = (n_slots, self.n_agents, self.layout.n_nodes)
        self._history = SlotHistory(shape, self.predictor.config, self.predictor.specials, self.device)

    @torch.inference_mode()
    def reset(self, which: np.ndarray) -> None:
        """Clear the histories of the slots `which` [B] bool, where episodes start."""
        self._history.reset(torch.as_tensor(which, device=self.device))

    def _fill(self, obs: Tensor, now: Tensor, played: Tensor, actions: Tensor) -> Reconstruction:
        seen, missing = (marks & played.view(-1, 1, 1) for marks in self.columns.sight(obs))
        self._history.push(self._tokens(obs, seen), played)
        stored = self.blank(tuple(missing.shape))
        # Agents that see everything, or nothing because they are dead, cost no prediction.
        rows = missing.flatten(0, 1).any(-1).nonzero().flatten()
        if len(rows):
            masked = missing.flatten(0, 1).index_select(0, rows)
            stored = self._stored(missing, self.guess(self._history.frames(rows, now), masked))
            obs = self.filled(obs, stored, missing, self.columns)
        else:
            obs = obs.clone()
        # After the prediction: a sight of this step is no memory yet.
        self._history.commit(now, played)
        return Reconstruction({self.field: stored}, obs, missing)

    def snapshot(self) -> dict[str, Tensor]:
        """Return the histories of all slots."""
        return self._history.snapshot()

    @torch.inference_mode()
    def load_snapshot(self, snapshot: dict[str, Tensor]) -> None:
        """Continue from a `snapshot` of as many slots."""
        self._history.restore(snapshot)

    def blank(self, shape: tuple[int, ...]) -> Tensor:
        """Return the stored field where nothing is guessed; `shape`: (B, n, N)."""
        if not self.mean:
            return torch.full(shape, -1, dtype=torch.int16, device=self.device)
        return torch.zeros((*shape[:-1], self.layout.obs_dim), dtype=torch.float16, device=self.device)

    def _tokens(self, obs: Tensor, seen: Tensor) -> Tensor:
        """Return the tokens [B, n, N] of the nodes of obs [B, n, obs_dim], MASK where they are not `seen`."""
        ids = torch.full(seen.shape, self.predictor.specials.mask, device=self.device)
        where = seen.flatten().nonzero().flatten()
        nodes = self.columns.nodes(obs).flatten(0, -2).index_select(0, where)
        ids.view(-1).index_copy_(0, where, self.tokenizer.ids(nodes))
        return ids

    def guess(self, frames: Frames, masked: Tensor, others: bool = False) -> Guess:
        """Predict the tokens `masked` [F, N] of frames, which pass in groups.

        others: predict all tokens but the agents' own, F·(N - 1) of them, so that shapes depend on no value.
        """
        n_nodes, tokens = masked.shape[1], frames.ids[0].numel()
        widest = max(tokens * self.predictor.config.d_model, n_nodes * (self.predictor.specials.n_codes + 1))
        at_once = max(1, self.floats_at_once // widest)
        guesses = []
        for part in (slice(i, i + at_once) for i in range(0, len(frames), at_once)):
            given = [masked[part]]
            if others:
                given.append(torch.arange(given[0].numel(), device=self.device).view(-1, n_nodes)[:, 1:].flatten())
            with autocast_bf16(self.device, self._bf16):
                logits = self.predictor(frames[part], *given)
            guesses.append(self.predictor.guess(logits.to(self.predictor.table.dtype)))
        return guesses[0] if len(guesses) == 1 else Guess(*(torch.cat(each) for each in zip(*guesses, strict=True)))

    def _stored(self, missing: Tensor, guess: Guess) -> Tensor:
        """Return the stored field [B, ...]: the guesses of the `missing` [B, n, N] nodes, rounded."""
        where = missing.flatten().nonzero().flatten()
        if not self.mean:
            stored = self.blank(tuple(missing.shape))
            stored.view(-1).index_copy_(0, where, guess.ids.to(torch.int16))
            return stored
        # Rounded before agents read it, as it is stored.
        nodes = torch.zeros((missing.numel(), self.layout.node_dim), dtype=torch.float16, device=self.device)
        return self.columns.obs(nodes.index_copy_(0, where, guess.features.half()).view(*missing.shape, -1))

    def features_of(self, stored: Tensor, missing: Tensor, columns: GraphTables) -> Tensor:
        """Return the features [..., n, obs_dim] of the `missing` [..., n, N] nodes, decoded from their codes."""
        if self.mean:
            return stored
        table = self.predictor.table_with_absent().to(stored.device)
        return columns.obs(table[torch.where(missing, stored.long(), self.predictor.specials.absent)])
