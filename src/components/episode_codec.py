"""Lossless encoding of episodes: a record of bytes for each row.

Encodings of a field:

- plain: its own bytes.
- bits: zeros and ones (`avail_actions`, booleans), one bit each.
- shown: `obs` equals the stored `full_obs` where the agent sees something and is 0 elsewhere, so one bit per feature.

Each encoded episode is checked against these rules. R is the width of a record in bytes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from omagd.utils.packing import Episode, EpisodeMeta

Spec = dict[str, tuple[torch.dtype, tuple[int, ...]]]
"""Type and shape of a row of each field."""

MASKS = frozenset({"avail_actions"})
SHOWN_IN = {"obs": "full_obs"}
_WHOLE = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integer types by size in bytes. Comparing and masking floats as integers keeps NaNs, and -0.0 apart from 0.0."""


def spec_of(episode: Episode) -> Spec:
    """Return type and shape of a row of each field."""
    return {name: (value.dtype, tuple(value.shape[1:])) for name, value in episode.items()}


class RuleBroken(ValueError):
    """The field `name` of an episode breaks the rule of its encoding."""

    def __init__(self, name: str) -> None:
        super().__init__(f"field {name} cannot be stored in short")
        self.name = name


@dataclass(frozen=True)
class Column:
    """Place of a field in a record: bytes `start` to `start + width`."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    kind: Literal["plain", "bits", "shown"]
    start: int
    width: int

    @property
    def numel(self) -> int:
        """Values of one row."""
        return math.prod(self.shape)


class Codec:
    """Encodes episodes of one spec.

    Args:
        spec: of all episodes, in the order of decoded fields. plain: fields that break their rule.
    """

    def __init__(self, spec: Spec, plain: Iterable[str] = ()) -> None:
        self.spec = dict(spec)
        self.plain = frozenset(plain)
        self._columns: dict[str, Column] = {}
        start = 0
        for name, (dtype, shape) in self.spec.items():
            kind, width = self._kind(name), math.prod(shape) * dtype.itemsize
            if kind != "plain":
                width = -(-math.prod(shape) // 8)
            self._columns[name] = Column(name, dtype, shape, kind, start, width)
            start += width
        self.width = start

    def without(self, name: str) -> Codec:
        """Return a codec that stores the field `name` plain."""
        return Codec(self.spec, self.plain | {name})

    def _kind(self, name: str) -> Literal["plain", "bits", "shown"]:
        dtype, shape = self.spec[name]
        if name in self.plain or math.prod(shape) <= 1:
            return "plain"
        if dtype == torch.bool or (name in MASKS and dtype == torch.uint8):
            return "bits"
        return "shown" if self.spec.get(SHOWN_IN.get(name, "")) == (dtype, shape) else "plain"

    def encode(self, episode: Episode) -> Tensor:
        """Return the records of one episode, [L + 1, R] uint8 on the CPU, in new memory.

        Errors: RuleBroken where a field breaks its rule.
        """
        rows = len(next(iter(episode.values())))
        records = np.empty((rows, self.width), np.uint8)
        for column in self._columns.values():
            value = _numbers(episode[column.name])
            part = records[:, column.start : column.start + column.width]
            if column.kind == "plain":
                part[:] = value.reshape(rows, column.numel).view(np.uint8).reshape(part.shape)
            elif column.kind == "bits":
                part[:] = _pack_mask(column.name, value.reshape(rows, column.numel).view(np.uint8))
            else:
                whole = f"i{column.dtype.itemsize}"
                pair = (value, _numbers(episode[SHOWN_IN[column.name]]))
                obs, full = (each.reshape(rows, column.numel).view(whole) for each in pair)
                part[:] = _pack_shown(column.name, obs, full)
        return torch.from_numpy(records)

    def encode_rows(self, fields: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Return the records [S, R] of rows [S, ...] on any device, and there whether no field breaks its rule."""
        rows, parts = len(next(iter(fields.values()))), []
        fits = torch.ones((), dtype=torch.bool, device=next(iter(fields.values())).device)
        for column in self._columns.values():
            value = fields[column.name].reshape(rows, column.numel)
            if column.kind == "plain":
                parts.append(value.view(torch.uint8).reshape(rows, column.width))
            elif column.kind == "bits":
                mask = value.view(torch.uint8)
                fits = fits & (mask <= 1).all()
                parts.append(_pack(mask))
            else:
                whole, full = _WHOLE[column.dtype.itemsize], fields[SHOWN_IN[column.name]].reshape(value.shape)
                shown = value.view(whole) == full.view(whole)
                fits = fits & (shown | (value.view(whole) == 0)).all()
                parts.append(_pack(shown.to(torch.uint8)))
        return torch.cat(parts, dim=1), fits

    def decode(self, records: Tensor, rows: Tensor | None = None) -> dict[str, Tensor]:
        """Return all fields, [S, ...] by name, of the records [*, R], or of their `rows` ([S] int64) in that order."""
        found: dict[str, Tensor] = {}
        for column in sorted(self._columns.values(), key=lambda column: column.kind == "shown"):  # after what they mask
            found[column.name] = self._field(records, rows, column, found)
        return {name: found[name] for name in self.spec}

    def field(self, records: Tensor, name: str) -> Tensor:
        """Return one field of the records [S, R], [S, ...]."""
        return self._field(records, None, self._columns[name], {})

    def _field(self, records: Tensor, rows: Tensor | None, column: Column, found: Mapping[str, Tensor]) -> Tensor:
        stored = records[:, column.start : column.start + column.width]
        # A copy in both cases: unaligned bytes cannot be viewed as numbers.
        stored = stored.clone(memory_format=torch.contiguous_format) if rows is None else stored.index_select(0, rows)
        shape = (len(stored), *column.shape)
        if column.kind == "plain":
            return stored.reshape(-1).view(column.dtype).reshape(shape)
        bits = _unpack(stored, column.numel)
        if column.kind == "bits":
            return bits.view(column.dtype).reshape(shape)
        source = SHOWN_IN[column.name]
        full = found[source] if source in found else self._field(records, rows, self._columns[source], found)
        whole = full.reshape(bits.shape).view(_WHOLE[column.dtype.itemsize])
        return torch.where(bits.view(torch.bool), whole, 0).view(column.dtype).reshape(shape)

    def state_dict(self) -> dict[str, Any]:
        """Return plain values for `from_state`."""
        spec = [[name, str(dtype).removeprefix("torch."), list(shape)] for name, (dtype, shape) in self.spec.items()]
        return {"spec": spec, "plain": sorted(self.plain)}

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Codec:
        """Return the codec of a `state_dict`."""
        return cls({name: (getattr(torch, kind), tuple(shape)) for name, kind, shape in state["spec"]}, state["plain"])


class StoredEpisode(Mapping[str, Tensor]):
    """An encoded episode whose fields are decoded on access; read-only."""

    def __init__(self, codec: Codec, records: Tensor, meta: EpisodeMeta) -> None:
        self._codec, self._records, self.meta = codec, records, meta

    def __getitem__(self, name: str) -> Tensor:
        return self._codec.field(self._records, name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._codec.spec)

    def __len__(self) -> int:
        return len(self._codec.spec)


def _numbers(value: Tensor) -> np.ndarray:
    """Return a field of an episode as a contiguous array."""
    return np.ascontiguousarray(
        value.detach().cpu().numpy() if value.requires_grad or value.device.type != "cpu" else value.numpy()
    )


def _pack_mask(name: str, mask: np.ndarray) -> np.ndarray:
    if mask.size and mask.max() > 1:
        raise RuleBroken(name)
    return np.packbits(mask, axis=1)


def _pack_shown(name: str, obs: np.ndarray, full: np.ndarray) -> np.ndarray:
    shown = obs == full
    if not (shown | (obs == 0)).all():
        raise RuleBroken(name)
    return np.packbits(shown, axis=1)


def _pack(bits: Tensor) -> Tensor:
    """Return zeros and ones [S, n] uint8 as bytes [S, n / 8, rounded up], as `np.packbits` does."""
    padded = torch.nn.functional.pad(bits, (0, -bits.shape[1] % 8)).view(len(bits), -1, 8)
    return (padded << torch.arange(7, -1, -1, dtype=torch.uint8, device=bits.device)).sum(dim=-1, dtype=torch.uint8)


@cache
def _table(device: torch.device) -> Tensor:
    """Return the eight bits of each byte as the eight bytes of an integer, [256] int64."""
    bits = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1)
    return torch.from_numpy(bits.view(np.int64)[:, 0].copy()).to(device, non_blocking=True)


def _unpack(packed: Tensor, count: int) -> Tensor:
    """Return the first `count` bits of each row of `packed` [S, bytes] uint8 as zeros and ones, [S, count] uint8."""
    table = _table(packed.device)
    each = table.index_select(0, packed.reshape(-1).int()).view(torch.uint8)
    return each.view(len(packed), 8 * packed.shape[1])[:, :count]
