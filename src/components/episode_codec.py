"""Lossless encoding of episodes, a record of bytes for each row, and their files.

Encodings of a field:

- plain: its own bytes.
- bits: zeros and ones (`avail_actions`, booleans), one bit each.
- shown: `obs` equals the stored `full_obs` where the agent sees something and is 0 elsewhere, so one bit per feature.

Each encoded episode is checked against these rules. R is the width of a record in bytes.

Files of episodes are archives of NumPy arrays (npz) with checksums; reading one cannot execute code. `about`: version
and facts as JSON; `rows` and `origin/<attribute>` of each episode; `field/<name>`: the rows of all episodes.
"""

from __future__ import annotations

import hashlib
import json
import math
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, BinaryIO, Literal

import numpy as np
import torch
from torch import Tensor

from omagd.utils.errors import UserError
from omagd.utils.packing import UNKNOWN, Episode, EpisodeMeta, RecordedEpisode, meta_of
from omagd.utils.storage import ABSENT, Unreadable, atomic_file, patiently

Spec = dict[str, tuple[torch.dtype, tuple[int, ...]]]
"""Type and shape of a row of each field."""

MASKS = frozenset({"avail_actions"})
SHOWN_IN = {"obs": "full_obs"}
_WHOLE = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integer types by size in bytes. Comparing and masking floats as integers keeps NaNs, and -0.0 apart from 0.0."""


def spec_of(episode: Episode) -> Spec:
    """Return type and shape of a row of each field."""
    return {name: (value.dtype, tuple(value.shape[1:])) for name, value in episode.items()}


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

    def without(self, names: Iterable[str]) -> Codec:
        """Return a codec that stores the fields `names` plain."""
        return Codec(self.spec, self.plain | {*names})

    def _kind(self, name: str) -> Literal["plain", "bits", "shown"]:
        dtype, shape = self.spec[name]
        if name in self.plain or math.prod(shape) <= 1:
            return "plain"
        if dtype == torch.bool or (name in MASKS and dtype == torch.uint8):
            return "bits"
        return "shown" if self.spec.get(SHOWN_IN.get(name, "")) == (dtype, shape) else "plain"

    def encode(self, fields: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the records [S, R] of rows [S, ...], where these are, in new memory.

        Returns also, for each field that is not stored plain, a scalar bool there: whether no row breaks its rule.
        """
        rows, parts, fits = len(next(iter(fields.values()))), [], {}
        for column in self._columns.values():
            value = fields[column.name].reshape(rows, column.numel)
            if column.kind == "plain":
                parts.append(value.contiguous().view(torch.uint8).reshape(rows, column.width))
            elif column.kind == "bits":
                mask = value.view(torch.uint8)
                fits[column.name] = (mask <= 1).all()
                parts.append(_pack(mask))
            else:
                whole, full = _WHOLE[column.dtype.itemsize], fields[SHOWN_IN[column.name]].reshape(value.shape)
                shown = value.view(whole) == full.view(whole)
                fits[column.name] = (shown | (value.view(whole) == 0)).all()
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


VERSION = 2
MARK = b"omagd-ep"
"""At the start of a file of version 1."""

ORIGIN, FIELD = "origin/", "field/"
"""Before the names of arrays."""

META: dict[str, Any] = asdict(UNKNOWN)
"""The attributes of an origin with their defaults."""

Facts = Mapping[str, str | int | float | bool]
"""Of the environment that the episodes belong to: name, map, shapes, ..."""


def write_episodes(path: str | Path, episodes: Sequence[Episode], facts: Facts) -> None:
    """Write `episodes` (all with the same fields) and `facts` to the file `path`, which appears whole or not at all."""
    fields, origins = (episodes[0] if episodes else ()), [meta_of(episode) for episode in episodes]
    with atomic_file(Path(path)) as file, zipfile.ZipFile(file, "w") as archive:

        def put(name: str, *parts: np.ndarray) -> None:
            """Write arrays one after the other, as one: the replay may fill the memory."""
            layout = np.lib.format.header_data_from_array_1_0(parts[0])
            shape = sum(len(part) for part in parts), *parts[0].shape[1:]
            with archive.open(zipfile.ZipInfo(f"{name}.npy"), "w", force_zip64=True) as stream:  # without the time
                np.lib.format.write_array_header_1_0(stream, {**layout, "fortran_order": False, "shape": shape})
                for part in parts:
                    stream.write(part.tobytes())

        put("about", np.array([json.dumps({"version": VERSION, "facts": dict(facts)})]))
        put("rows", np.array([len(next(iter(episode.values()))) for episode in episodes], np.int64))
        for name, default in META.items():
            put(ORIGIN + name, np.array([getattr(origin, name) for origin in origins], type(default)))
        for name in fields:
            put(FIELD + name, *(episode[name].detach().cpu().numpy() for episode in episodes))


def read_episodes(path: str | Path, facts: Facts, key: str, most: int) -> list[Episode]:
    """Return the episodes of the file `path` as CPU tensors of exact size.

    Args:
        facts: of this run; each must be the same in the file. key: configuration key to name in errors.
        most: episodes that this run can keep.

    Errors: UserError for a file that is missing, no episode file, damaged, of another run or too large.
    """
    try:
        return _read_episodes(Path(path), facts, key, most)
    except OSError as error:
        raise UserError(f"{key}={path} cannot be read: {error.strerror}") from error


def _read_episodes(path: Path, facts: Facts, key: str, most: int) -> list[Episode]:
    """As `read_episodes`; errors of the system are OSError."""
    what = f"{key}={path}"
    with path.open("rb") as file:
        try:
            earlier = file.read(len(MARK)) == MARK
            file.seek(0)
            found = _version_1(file) if earlier else np.load(file, allow_pickle=False)
            rows = found["rows"].tolist()
            if min(rows, default=1) < 1:
                raise ValueError("an episode without a step")
            _require_fitting(what, json.loads(found["about"].item()), len(rows), facts, most)
            known: dict[str, EpisodeMeta] = {}  # steps of one episode share an object
            origins = zip(*(found[ORIGIN + name].tolist() for name in META), strict=True)
            meta = [known.setdefault(repr(each), EpisodeMeta(*each)) for each in origins]
            fields = {name.removeprefix(FIELD): _split(found[name], rows) for name in found if name.startswith(FIELD)}
            episodes = [dict(zip(fields, each, strict=True)) for each in zip(*fields.values(), strict=True)]
            return [RecordedEpisode(*each) for each in zip(episodes, meta, strict=True)]
        except (UserError, OSError):
            raise
        except Exception as problem:  # NumPy raises many kinds for a file that is not its own
            raise UserError(f"{what} is damaged or no file of episodes: copy or collect it again") from problem


def _require_fitting(what: str, about: Mapping[str, Any], count: int, facts: Facts, most: int) -> None:
    """Require a file that this program and this run can read. Errors: UserError."""
    if about["version"] != VERSION:
        raise UserError(f"{what} has another version than {VERSION}: collect it again")
    for name, value in facts.items():
        if (there := about["facts"].get(name)) != value:
            raise UserError(f"{what} does not fit: {name} is {there} there and {value} in this run")
    if count > most:
        raise UserError(f"{what} holds {count} episodes, this run keeps {most}: allow more episodes")


def _split(values: np.ndarray, rows: list[int]) -> list[Tensor]:
    """Return the rows of each episode, in memory that is freed with them."""
    return [part.clone() for part in torch.from_numpy(values).split(rows)]


def _version_1(file: BinaryIO) -> dict[str, np.ndarray]:
    """Return the arrays of a file of version 1: mark, length of a header in JSON, its SHA-256, header, raw arrays."""
    file.seek(len(MARK))
    length, digest = int.from_bytes(file.read(8), "little"), file.read(32)
    text = file.read(length)
    if hashlib.sha256(text).digest() != digest:
        raise ValueError("header")
    header = json.loads(text)
    rows, origins = header["rows"], header.get("meta", {})
    if any(type(count) is not int for count in rows):
        raise ValueError("rows")
    about = {"version": VERSION, "facts": header["facts"]}
    found = {"about": np.array([json.dumps(about)]), "rows": np.array(rows, np.int64)}
    for name, default in META.items():
        values = [default if value is None else value for value in origins.get(name, [default] * len(rows))]
        found[ORIGIN + name] = np.array(values, type(default))
    for field in header["fields"]:
        shape = sum(rows), *field["shape"]
        array = np.fromfile(file, field["dtype"], math.prod(shape)).reshape(shape)
        if hashlib.sha256(array.data).hexdigest() != field["sha256"]:
            raise ValueError(field["name"])
        found[FIELD + field["name"]] = array
    if file.read(1):
        raise ValueError("size")
    return found


@dataclass(frozen=True)
class EpisodeRange:
    """Successive episodes of a buffer, in its encoding: number `first` to `first + len(records) - 1` of all ever added.

    Attributes:
        codec: of the records; None where there are none. records: of each episode, [L + 1, R] uint8. meta: its origin.
    """

    first: int
    codec: Codec | None
    records: tuple[Tensor, ...]
    meta: tuple[EpisodeMeta, ...]

    def describe(self) -> dict[str, Any]:
        """Return plain values that `load_range` needs beside the file."""
        codec = None if self.codec is None else self.codec.state_dict()
        return {"first": self.first, "count": len(self.records), "codec": codec}

    def save(self, path: Path) -> None:
        """Write the records to a file that appears whole or not at all."""
        episodes = zip(self.records, self.meta, strict=True)
        write_episodes(path, [RecordedEpisode({"records": records}, meta) for records, meta in episodes], {})

    def from_number(self, number: int) -> EpisodeRange:
        """Return the episodes from the `number`-th on."""
        skipped = min(max(0, number - self.first), len(self.records))
        return EpisodeRange(self.first + skipped, self.codec, self.records[skipped:], self.meta[skipped:])

    def each(self) -> Iterator[EpisodeRange]:
        """Yield the episodes one by one."""
        for number, (records, meta) in enumerate(zip(self.records, self.meta, strict=True), self.first):
            yield EpisodeRange(number, self.codec, (records,), (meta,))


def load_range(path: Path, described: Mapping[str, Any]) -> EpisodeRange:
    """Return the episodes of a file that `describe` has described.

    Errors: ValueError for a file that does not fit; Unreadable where the system cannot read it.
    """
    try:
        episodes = patiently(path, partial(_read_episodes, path, {}, "episodes", int(described["count"])))
        records = [episode["records"] for episode in episodes]
        codec = Codec.from_state(described["codec"])
    except Unreadable:
        raise
    except UserError as problem:
        raise ValueError(problem.message) from problem
    except ABSENT as problem:
        raise ValueError(f"{path.name} cannot be read: {problem.strerror}") from problem
    except (KeyError, TypeError, AttributeError) as problem:
        raise ValueError(f"the description of {path.name} is incomplete ({problem})") from problem
    if len(records) != described["count"] or any(each.shape[1:] != (codec.width,) for each in records):
        raise ValueError(f"{path.name} does not fit its description")
    return EpisodeRange(int(described["first"]), codec, tuple(records), tuple(map(meta_of, episodes)))
