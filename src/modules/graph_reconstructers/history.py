"""What an agent remembers of each node: stacked frames of tokens, and when it was last seen.

`PackedHistory` computes this for whole episodes in learning, `SlotHistory` step by step in acting; both give the same
`Frames`. Ids outside the codebook:

- input MASK = K: unseen now, alive or dead;
- input PAD = K + 1: before the episode's start, or never seen;
- input HIDDEN = K + 2: a seen node that is masked for training;
- output ABSENT = K: dead. The predictor never reads ABSENT: it must infer death from what it sees and remembers.

Shapes: S packed rows, B slots, n agents, N nodes, k frames s steps apart, F chosen frames.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
from torch import Tensor

from omagd.config.schema import MaskPredictorConfig
from omagd.utils.packing import Packing

N_SPECIAL = 3


class Specials:
    """The ids outside a codebook of K codes; their meaning is at the top of this file."""

    def __init__(self, n_codes: int) -> None:
        self.n_codes = self.mask = self.absent = n_codes
        self.pad, self.hidden = n_codes + 1, n_codes + 2


@dataclass(frozen=True)
class Frames:
    """Input of the predictor for F frames.

    Attributes:
        ids: [F, k, N] int64, oldest first, the last one is predicted. step: [F] int64, step of the last one.
        last_ids: [F, N] int64, token when last seen before (PAD: never). age: [F, N] int64, steps since (0: never).
    """

    ids: Tensor
    step: Tensor
    last_ids: Tensor
    age: Tensor

    def __getitem__(self, rows: Tensor | slice) -> Frames:
        return Frames(self.ids[rows], self.step[rows], self.last_ids[rows], self.age[rows])

    def __len__(self) -> int:
        return len(self.step)


def last_seen_step(seen: Tensor, packing: Packing) -> Tensor:
    """Return the step [S, n, N] at which each node was last seen strictly before each row; -1: never.

    The running maximum of the steps at which it was seen, shifted by one step. seen: [S, n, N] bool.
    """
    at = torch.where(seen, packing.step.to(seen.device, non_blocking=True)[:, None, None], -1)
    padded = packing.pad(at, -1).cummax(dim=1).values
    before = torch.cat([torch.full_like(padded[:, :1], -1), padded[:, :-1]], dim=1)
    return packing.pack(before)


class PackedHistory:
    """Histories of whole packed episodes.

    Args:
        ids: [S, n, N] int64, tokens of every row, MASK where unseen. packing: of the rows.
    """

    def __init__(self, ids: Tensor, packing: Packing, config: MaskPredictorConfig, specials: Specials) -> None:
        self._ids, self._packing, self._config, self._specials = ids, packing, config, specials
        self._device = ids.device
        places = (packing.step, packing.episode)
        self._step, self._episode = (place.to(ids.device, non_blocking=True) for place in places)
        self._last_step = last_seen_step(self._ids < self._specials.n_codes, packing)

    def frames(self, rows: Tensor, agents: Tensor) -> Frames:
        """Return the inputs of the frames (row [F], agent [F]), nothing of them HIDDEN."""
        step, episode = self._step[rows], self._episode[rows]
        back = torch.arange(self._config.stacked_steps - 1, -1, -1, device=self._device) * self._config.stacked_strip
        at = step[:, None] - back
        past = self._packing.row(at, episode[:, None])
        ids = self._ids[past, agents[:, None]]
        ids = torch.where((at < 0)[..., None], self._specials.pad, ids)
        last_rows, never = self.last_rows(rows, agents)
        nodes = torch.arange(ids.shape[-1], device=self._device)
        last_ids = torch.where(never, self._specials.pad, self._ids[last_rows, agents[:, None], nodes])
        age = torch.where(never, 0, step[:, None] - self._last_step[rows, agents])
        return Frames(ids, step, last_ids, age)

    def last_rows(self, rows: Tensor, agents: Tensor) -> tuple[Tensor, Tensor]:
        """Return the row [F, N] in which each node was last seen before, and whether it never was, [F, N] bool."""
        last = self._last_step[rows, agents]
        return self._packing.row(last, self._episode[rows][:, None]), last < 0


class SlotHistory:
    """Histories of B battle slots while they are played.

    Attributes:
        past: [(k - 1)·s + 1, B, n, N] int64, newest last. last_ids, last_step: [B, n, N] int64.
    """

    def __init__(
        self, shape: tuple[int, int, int], config: MaskPredictorConfig, specials: Specials, device: torch.device
    ) -> None:
        """Start empty; shape: (B, n, N)."""
        self._config, self._specials = config, specials
        depth = (config.stacked_steps - 1) * config.stacked_strip + 1
        self.past = torch.full((depth, *shape), specials.pad, device=device)
        self.last_ids = torch.full(shape, specials.pad, device=device)
        self.last_step = torch.full(shape, -1, device=device)

    def reset(self, which: Tensor) -> None:
        """Forget the slots `which` [B] bool."""
        self.past[:, which] = self._specials.pad
        self.last_ids[which] = self._specials.pad
        self.last_step[which] = -1

    def push(self, ids: Tensor) -> None:
        """Add the tokens of this step, [B, n, N] with MASK where unseen; call `frames`, then `commit` after it."""
        self.past = torch.cat([self.past[1:], ids[None]])

    def frames(self, rows: Tensor, step: Tensor) -> Frames:
        """Return the inputs of the agents `rows` [F] of B·n at `step` [B]."""
        now = step.index_select(0, rows // self.past.shape[2])
        ids = self.past[:: self._config.stacked_strip].flatten(1, 2).index_select(1, rows).transpose(0, 1)
        last_ids, last = (kept.flatten(0, 1).index_select(0, rows) for kept in (self.last_ids, self.last_step))
        return Frames(ids, now, last_ids, (now[:, None] - last).masked_fill_(last < 0, 0))

    def commit(self, step: Tensor) -> None:
        """Record the pushed tokens as last seen at `step` [B]."""
        now = self.past[-1]
        seen = now < self._specials.n_codes
        self.last_ids = torch.where(seen, now, self.last_ids)
        self.last_step = torch.where(seen, step[:, None, None], self.last_step)

    def take(self, slots: Tensor) -> SlotHistory:
        """Return the histories of the slot numbers `slots` [P] as a copy, to be changed and `put` back."""
        part = copy.copy(self)
        part.past, part.last_ids, part.last_step = self.past[:, slots], self.last_ids[slots], self.last_step[slots]
        return part

    def put(self, slots: Tensor, part: SlotHistory) -> None:
        """Replace the histories of the slot numbers `slots` [P] by those of `part`."""
        self.past[:, slots], self.last_ids[slots], self.last_step[slots] = part.past, part.last_ids, part.last_step

    def snapshot(self) -> dict[str, Tensor]:
        """Return everything as tensors."""
        return {name: getattr(self, name).clone() for name in ("past", "last_ids", "last_step")}

    def restore(self, snapshot: dict[str, Tensor]) -> None:
        """Continue from a `snapshot` of the same sizes."""
        for name in ("past", "last_ids", "last_step"):
            setattr(self, name, snapshot[name].to(self.past.device).clone())
