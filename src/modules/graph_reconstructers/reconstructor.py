"""Stage 3's eyes: both frozen modules, step by step while acting; stored so that learning reads the same bits.

Shapes: B slots, n agents, R = B·n rows, N nodes, D features, F frames with something to guess, M nodes to guess.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from omagd.config.env_info import EnvInfo
from omagd.config.schema import Config
from omagd.modules.graph_reconstructers.frozen import FrozenPredictor, FrozenTokenizer
from omagd.modules.graph_reconstructers.graphs import Columns
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

    Only nodes that are missing are guessed, those of all slots and agents in one call. The last bits of a guess depend
    on what else is guessed in the same tick (sums are ordered by sizes), on nothing else: what is stored is what was
    acted on.

    Args:
        tokenizer, predictor: trained; frozen and put into eval mode here, where they are. config: for `decode`,
            `acting_precision`. info: of an environment with a layout.

    Attributes:
        seconds, calls, frames: spent in `step`, ticks, and frames with something to guess, since construction.

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
        self.seconds, self.calls, self.frames = 0.0, 0, 0
        self._bf16 = config.acting_precision == "bf16"
        self._columns = Columns(self.layout, self.device)
        self._frozen: tuple[FrozenTokenizer, FrozenPredictor] | None = None
        self._version = -1
        self.begin(0)

    @property
    def field(self) -> str:
        """Name of the stored field: `recon` float16 [n, obs_dim] under `decode: mean`, else `tokens` int16 [n, N]."""
        return "recon" if self.mean else "tokens"

    def begin(self, n_slots: int) -> None:
        """Start with empty histories in `n_slots` slots, and with both modules' weights as they are now."""
        modules = self.tokenizer, self.predictor
        version = sum(value._version for module in modules for value in module.state_dict(keep_vars=True).values())
        if self._frozen is None or version != self._version:
            self._frozen = FrozenTokenizer(self.tokenizer), FrozenPredictor(self.predictor, self._bf16)
            self._version = version
        config, specials = self.predictor.config, self.predictor.specials
        shape = (n_slots, self.n_agents, self.layout.n_nodes)
        self._history = SlotHistory(shape, config, specials, self.device)

    @torch.inference_mode()
    def reset(self, which: np.ndarray) -> None:
        """Forget the histories of the slots `which` [B] bool: episodes start there."""
        self._history.reset(torch.as_tensor(which, device=self.device))

    @torch.inference_mode()
    def step(
        self, obs: np.ndarray | Tensor, step: np.ndarray | Tensor, active: np.ndarray | Tensor | None = None
    ) -> Reconstruction:
        """Reconstruct one tick: obs [B, n, obs_dim] float32 at `step` [B] of the episodes. Called once per tick.

        active: [B] bool, slots to take in; the others' histories stay, and they pass as they are seen. None: all.
        """
        start = time.perf_counter()
        obs = torch.as_tensor(obs, device=self.device)
        now = torch.as_tensor(step, device=self.device).long()
        if active is None or active.all():
            result = self._tick(obs, now, self._history)
        else:
            slots = torch.as_tensor(active, device=self.device).nonzero().flatten()
            part = self._history.take(slots)
            result = self._among(obs, slots, self._tick(obs[slots], now[slots], part))
            self._history.put(slots, part)
        self.calls += 1
        self.seconds += time.perf_counter() - start
        return result

    @torch.no_grad()
    def restore(self, data: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Return (reconstructed obs [..., n, obs_dim], guessed [..., n, N]), the same bits as `step` gave.

        data: `obs` and the field that `step` asked to store.
        """
        obs, stored = data["obs"], data[self.field]
        columns = self._columns if obs.device == self.device else Columns(self.layout, obs.device)
        missing = columns.sight(obs)[1]
        return self._filled(obs, stored, missing, columns), missing

    def snapshot(self) -> dict[str, Tensor]:
        """Return the histories of all slots."""
        return self._history.snapshot()

    @torch.inference_mode()
    def load_snapshot(self, snapshot: dict[str, Tensor]) -> None:
        """Continue from a `snapshot` of as many slots."""
        self._history.restore(snapshot)

    def _tick(self, obs: Tensor, now: Tensor, history: SlotHistory) -> Reconstruction:
        """Reconstruct obs [B, n, obs_dim] at steps `now` [B] of slots with these histories, which move on."""
        seen, missing = self._columns.sight(obs)
        history.push(self._tokens(obs, seen))
        stored = self._blank(tuple(missing.shape))
        rows = missing.flatten(0, 1).any(-1).nonzero().flatten()
        if len(rows):
            stored = self._stored(missing, self._guess(rows, missing, now, history))
            obs = self._filled(obs, stored, missing, self._columns)
        else:
            obs = obs.clone()
        history.settle(now)
        return Reconstruction({self.field: stored}, obs, missing)

    def _among(self, obs: Tensor, slots: Tensor, part: Reconstruction) -> Reconstruction:
        """Return `part`, of the slot numbers `slots` [P] alone, among all that `obs` [B, n, obs_dim] shows."""
        fields = {self.field: self._blank((*obs.shape[:2], self.layout.n_nodes))}
        whole = Reconstruction(fields, obs.clone(), part.guessed.new_zeros((*obs.shape[:2], self.layout.n_nodes)))
        whole.fields[self.field][slots] = part.fields[self.field]
        whole.obs[slots], whole.guessed[slots] = part.obs, part.guessed
        return whole

    def _blank(self, shape: tuple[int, ...]) -> Tensor:
        """Return the field of nodes `shape` [B, n, N] of which none is guessed."""
        if not self.mean:
            return torch.full(shape, -1, dtype=torch.int16, device=self.device)
        return torch.zeros((*shape[:-1], self.layout.obs_dim), dtype=torch.float16, device=self.device)

    def _tokens(self, obs: Tensor, seen: Tensor) -> Tensor:
        """Return the tokens [B, n, N] of the nodes of obs [B, n, obs_dim], MASK where they are not `seen`."""
        assert self._frozen is not None
        ids = torch.full(seen.shape, self.predictor.specials.mask, device=self.device)
        where = seen.flatten().nonzero().flatten()
        nodes = self._columns.nodes(obs).flatten(0, -2).index_select(0, where)
        ids.view(-1).index_copy_(0, where, self._frozen[0](nodes))
        return ids

    def _guess(self, rows: Tensor, missing: Tensor, now: Tensor, history: SlotHistory) -> Guess:
        """Guess what the agents `rows` [F] of B·n miss, at step `now` [B]."""
        assert self._frozen is not None
        self.frames += len(rows)
        which = missing.flatten(0, 1).index_select(0, rows).flatten().nonzero().flatten()
        return self._frozen[1](history.frames(rows, now), which)

    def _stored(self, missing: Tensor, guess: Guess) -> Tensor:
        """Return the field [B, ...] that holds the guesses for the nodes that are `missing` [B, n, N]."""
        where = missing.flatten().nonzero().flatten()
        if not self.mean:
            stored = self._blank(tuple(missing.shape))
            stored.view(-1).index_copy_(0, where, guess.ids.to(torch.int16))
            return stored
        nodes = torch.zeros((missing.numel(), self.layout.node_dim), dtype=torch.float16, device=self.device)
        return self._columns.obs(nodes.index_copy_(0, where, guess.features.half()).view(*missing.shape, -1))

    def _filled(self, obs: Tensor, stored: Tensor, missing: Tensor, columns: Columns) -> Tensor:
        """Return obs [..., n, obs_dim] with what is `stored` in place of what is `missing` [..., n, N]."""
        if self.mean:
            guessed = stored.to(obs.dtype)
        else:
            table = self.predictor.table_with_absent().to(obs.device, obs.dtype)
            guessed = columns.obs(table[torch.where(missing, stored.long(), self.predictor.specials.absent)])
        return torch.where(columns.of_nodes(missing), guessed, obs)
