"""Batches of episodes of different lengths without padding, packed time step by time step, and returns over them.

An episode of L steps has L + 1 rows: row t holds the observation before action t, the action and its result; the last
row holds the closing observation only. Episodes are sorted by decreasing length: step t of all episodes that reach it
is one contiguous block of `batch_sizes[t]` rows. S is the number of rows of all episodes together.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, TypeVar, overload

import numpy as np
import torch
from torch import Tensor

T = TypeVar("T")
WEIGHT = "weight"
"""Field of a batch that says how much each row counts, [S] float; without it all count alike."""


@dataclass(frozen=True)
class Packing:
    """The place of each row of a packed batch in its episode.

    Args:
        lengths: rows of each episode, decreasing, all ≥ 1.
    """

    lengths: tuple[int, ...]

    def __post_init__(self) -> None:
        lengths = np.asarray(self.lengths)
        if not len(lengths) or (lengths[1:] > lengths[:-1]).any() or lengths[-1] < 1:
            raise ValueError("a packing needs decreasing lengths of at least one row")

    @property
    def n_episodes(self) -> int:
        """B."""
        return len(self.lengths)

    @property
    def n_steps(self) -> int:
        """T: rows of the longest episode."""
        return self.lengths[0]

    @cached_property
    def batch_sizes(self) -> list[int]:
        """Number of episodes that reach each time step, [T], decreasing."""
        ends = np.bincount(self.lengths)  # how many episodes have each number of rows
        sizes: list[int] = (self.n_episodes - ends.cumsum()[:-1]).tolist()
        return sizes

    @cached_property
    def starts(self) -> Tensor:
        """First row of each time step, [T] int64 (CPU)."""
        sizes = torch.tensor(self.batch_sizes)
        return sizes.cumsum(0) - sizes

    @cached_property
    def _rows(self) -> tuple[Tensor, Tensor]:
        step = np.arange(self.n_steps).repeat(self.batch_sizes)
        episode = np.arange(len(step)) - self.starts.numpy()[step]
        return torch.from_numpy(episode), torch.from_numpy(step)

    @property
    def episode(self) -> Tensor:
        """Episode of each row, [S] int64 (CPU)."""
        return self._rows[0]

    @property
    def step(self) -> Tensor:
        """Time step of each row, [S] int64 (CPU)."""
        return self._rows[1]

    @cached_property
    def closing(self) -> Tensor:
        """True for the closing observation of an episode, [S] bool (CPU)."""
        return self.step == torch.tensor(self.lengths)[self.episode] - 1

    @cached_property
    def acting(self) -> Tensor:
        """Rows in which an action was taken, int64 (CPU); of fixed shapes all but the last rows of a batch."""
        return torch.nonzero(~self.closing).flatten()

    @cached_property
    def next_row(self) -> Tensor:
        """For each row that of the next step of its episode, for an episode's last row itself, [S] int64 (CPU)."""
        return self.row(torch.minimum(self.step + 1, torch.tensor(self.lengths)[self.episode] - 1), self.episode)

    @cached_property
    def previous_row(self) -> Tensor:
        """For each row that of the step before in its episode, for an episode's first row itself, [S] int64 (CPU)."""
        return self.row(self.step - 1, self.episode)

    def row(self, step: Tensor, episode: Tensor) -> Tensor:
        """Return the rows of steps of episodes; those of steps before 0, which stand for none, are first rows.

        step: int64, below the episode's length. episode: int64 that broadcasts to it, on any device. Returns int64 on
        the device of `step`.
        """
        starts, episode = (values.to(step.device, non_blocking=True) for values in (self.starts, episode))
        return starts[step.clamp(min=0)] + episode

    def steps_of(self, episodes: Sequence[int] | Tensor) -> tuple[Tensor, Packing]:
        """Return the rows [R] int64 (CPU) of some episodes, the longest first, but closing ones, and their packing."""
        packing = Packing(tuple(self.lengths[place] - 1 for place in episodes))
        return self.row(packing.step, torch.tensor(episodes)[packing.episode]), packing

    def pad(self, packed: Tensor, fill: float = 0) -> Tensor:
        """Return packed rows [S, ...] as [B, T, ...], with `fill` after the end of an episode."""
        out = packed.new_full((self.n_episodes, self.n_steps, *packed.shape[1:]), fill)
        out[self.places(packed.device)] = packed
        return out

    def pack(self, padded: Tensor) -> Tensor:
        """Return the existing rows of [B, T, ...] as [S, ...]."""
        return padded[self.places(padded.device)]

    def places(self, device: torch.device) -> tuple[Tensor, ...]:
        """Return episode and step of each row on a device. To a GPU nothing here is copied such that the host waits."""
        return tuple(places.to(device, non_blocking=True) for places in self._rows)


@dataclass(frozen=True, slots=True)
class EpisodeMeta:
    """Origin of an episode.

    Attributes:
        slot: on its rank. seed: reset seed. task: index of its task. group: name that episodes share which are compared
            with one another, such as several from one start. outcome: 1 for a battle that was won, 0 for another; NaN
            where it is unknown, so it takes no part in comparisons.
    """

    slot: int = 0
    seed: int = 0
    task: int = 0
    group: str = ""
    outcome: float = field(default=math.nan, compare=False)


UNKNOWN = EpisodeMeta()


class Rows(Sequence[T]):
    """Objects that are made when they are asked for. make: from a row of `columns`, all of one length."""

    def __init__(self, make: Callable[..., T], *columns: Sequence[Any] | np.ndarray) -> None:
        self._make, self._columns = make, columns

    def __len__(self) -> int:
        return len(self._columns[0])

    def __eq__(self, other: object) -> bool:
        return [*self] == [*other] if isinstance(other, Sequence) else NotImplemented

    def __iter__(self) -> Iterator[T]:
        return map(self._make, *(_plain(column) for column in self._columns))

    @overload
    def __getitem__(self, index: int) -> T: ...
    @overload
    def __getitem__(self, index: slice) -> Rows[T]: ...
    def __getitem__(self, index: int | slice) -> T | Rows[T]:
        if isinstance(index, slice):
            return Rows(self._make, *(column[index] for column in self._columns))
        return self._make(*(_plain(column[index]) for column in self._columns))


def _plain(value: Any) -> Any:
    """Return an array's elements, or a NumPy number, as Python's."""
    return value.tolist() if isinstance(value, (np.ndarray, np.generic)) else value


@dataclass(frozen=True)
class PackedBatch:
    """Named tensors [S, ...] of some episodes, packed. docs/extending_batch.md lists the names with shapes and types.

    Attributes:
        data: tensors by name. packing: of their rows.
        sample_index: [B], place of each (sorted) episode in the sample as it was drawn, for draws that must not
            depend on how a batch is distributed over ranks.
        meta: [B], origin of each episode, in the order of the packing; empty where it is not recorded.
    """

    data: Mapping[str, Tensor]
    packing: Packing
    sample_index: tuple[int, ...]
    meta: tuple[EpisodeMeta, ...] = ()

    def __getitem__(self, name: str) -> Tensor:
        return self.data[name]

    def __contains__(self, name: object) -> bool:
        return name in self.data

    @property
    def valid_mask(self) -> Tensor:
        """True for rows with a step, which are all but the closing rows, [S] bool, on the batch's device."""
        return ~self.packing.closing.to(self.device, non_blocking=True)

    @property
    def device(self) -> torch.device:
        """Device of the tensors."""
        return next(iter(self.data.values())).device

    def to(self, device: torch.device) -> PackedBatch:
        """Return the batch on `device`."""
        moved = {name: value.to(device, non_blocking=True) for name, value in self.data.items()}
        return replace(self, data=moved)

    def split(self, parts: int) -> list[PackedBatch]:
        """Return the episodes in at most `parts` batches of about equal size, each with long and short ones."""
        parts = min(parts, self.packing.n_episodes)
        if parts == 1:
            return [self]
        return [self.select(range(place, self.packing.n_episodes, parts)) for place in range(parts)]

    def select(self, episodes: Sequence[int]) -> PackedBatch:
        """Return the batch of some episodes, at least one, by their places in the packing, in falling length."""
        places = sorted(episodes)
        chosen = torch.zeros(self.packing.n_episodes, dtype=torch.bool)
        chosen[places] = True
        rows = torch.nonzero(chosen[self.packing.episode]).flatten().to(self.device, non_blocking=True)
        data = {name: value[rows] for name, value in self.data.items()}
        lengths, index = self.packing.lengths, self.sample_index
        meta = tuple(self.meta[place] for place in places) if self.meta else ()
        return PackedBatch(data, Packing(tuple(lengths[i] for i in places)), tuple(index[i] for i in places), meta)


Episode = Mapping[str, Tensor]
"""One episode: tensors [L + 1, ...] by name."""


class RecordedEpisode(dict[str, Tensor]):
    """An episode with its origin.

    Args:
        fields: tensors [L + 1, ...] by name. meta: where it comes from.
    """

    def __init__(self, fields: Episode, meta: EpisodeMeta) -> None:
        super().__init__(fields)
        self.meta = meta


def meta_of(episode: Episode) -> EpisodeMeta:
    """Return the origin of an episode, `UNKNOWN` where it is not recorded."""
    meta: EpisodeMeta = getattr(episode, "meta", UNKNOWN)
    return meta


def last_actions(actions: Tensor, packing: Packing) -> Tensor:
    """Return each row's previous action in its episode, [S, n] int64 from actions [S, n]; -1 in first rows.

    Continuous actions [S, n, d] keep their type; 0 in first rows.
    """
    first = packing.n_episodes
    continuous = actions.is_floating_point()
    kind, nothing = (actions.dtype, 0) if continuous else (torch.int64, -1)
    if packing.lengths[-1] == packing.n_steps:  # episodes of equal length: one shift
        none = torch.full_like(actions[:first], nothing, dtype=kind)
        return torch.cat([none, actions[:-first].to(kind)])
    result = actions[packing.previous_row.to(actions.device, non_blocking=True)].to(kind)
    result[:first] = nothing
    return result


def time_order(rows: Sequence[int]) -> tuple[Packing, tuple[int, ...], Tensor]:
    """Return the packing of episodes with these numbers of `rows`.

    Returns the packing, the order of the episodes in it, and for each of its S rows the index in the concatenation of
    the episodes in that order ([S] int64).
    """
    numbers = np.asarray(rows, np.int64)
    order = (-numbers).argsort(kind="stable")
    lengths = numbers[order]
    packing = Packing(tuple(lengths.tolist()))
    place = (lengths.cumsum() - lengths)[packing.episode.numpy()] + packing.step.numpy()
    return packing, tuple(order.tolist()), torch.from_numpy(place)


def few(count: int) -> int:
    """Return the least of 1, 2, ..., 8, 10, 12, 14, 16, 20, ... that holds `count`: a fourth more at most."""
    unit = 2 ** max(0, (count - 1).bit_length() - 3)
    return max(1, -(-count // unit) * unit)


def pack_episodes(episodes: Sequence[Episode]) -> PackedBatch:
    """Pack episodes with equal names; `sample_index` keeps the order in which they were given."""
    packing, order, gather = time_order([len(next(iter(episode.values()))) for episode in episodes])
    # Concatenating episodes first, then one gather into time order, is the cheapest way.
    laid = {name: torch.cat([episodes[i][name] for i in order]) for name in episodes[0]}
    data = {name: value.index_select(0, gather.to(value.device, non_blocking=True)) for name, value in laid.items()}
    return PackedBatch(data, packing, order, tuple(meta_of(episodes[i]) for i in order))


def rewards_of_agents(batch: PackedBatch) -> Tensor:
    """Return the agents' own rewards [S, n] where the environment gives them, else the team's, [S, 1]."""
    return batch["agent_reward"] if "agent_reward" in batch else batch["reward"].unsqueeze(-1)


def batch_targets(
    values: Tensor, batch: PackedBatch, gamma: float, td_lambda: float, taken: Tensor | None = None
) -> Tensor:
    """Return the lambda-returns of every row of a batch: of the team, or of each agent from `rewards_of_agents`.

    values: [S], the team's, or [S, n], one per agent. taken: as in `td_lambda_targets`. Returns their shape and type.
    """
    reward, terminated = batch["reward"], batch["terminated"].to(values.dtype)
    if values.dim() > 1:
        reward, terminated = rewards_of_agents(batch), terminated.unsqueeze(-1)
    return td_lambda_targets(reward.to(values.dtype), terminated, values, batch.packing, gamma, td_lambda, taken)


def td_lambda_targets(
    reward: Tensor, terminated: Tensor, values: Tensor, packing: Packing, gamma: float, td_lambda: float,
    taken: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Return the lambda-return of every step, [S]; closing rows hold 0.

    G(t) = r(t) + gamma (1 - terminated(t)) ((1 - lambda) v(t+1) + lambda G(t+1))   (Sutton and Barto 2018, eq. 12.18)

    with G = v in the closing row, so that an episode that was cut off bootstraps from its last observation.

    reward, terminated: [S], what followed the action of each row. values: [S], v of the observation in each row. With
    one value per agent, values are [S, n], and reward and terminated broadcast to them.
    taken: None, or q of the action that each row took, in the shape of values; then lambda weighs v + G - q in place of
        G: Q(lambda) with off-policy corrections (Harutyunyan et al. 2016, arXiv:1602.04951, eq. 4).
    """
    closing = packing.closing.to(values.device, non_blocking=True).view(-1, *[1] * (values.dim() - 1))
    later = values[packing.next_row.to(values.device, non_blocking=True)]  # v(t+1)
    # After a terminal step there is no value; an episode that was only cut off has one at its end.
    keep = gamma * (1.0 - terminated)
    if taken is not None:  # v(t+1) - q(t+1): what exploring, or an older policy, lost there; nothing was taken at ends
        lost = (values - taken).masked_fill(closing, 0)
        reward = reward + td_lambda * keep * lost[packing.next_row.to(values.device, non_blocking=True)]
    targets = torch.where(closing, values, reward + (1.0 - td_lambda) * keep * later)
    weight = (td_lambda * keep).masked_fill(closing, 0)  # of G(t+1) in G(t)
    sums = _step_by_step if values.device.type == "cpu" else by_doubling
    return sums(targets, weight.expand_as(targets), packing).masked_fill_(closing, 0)


def _step_by_step(targets: Tensor, weight: Tensor, packing: Packing) -> Tensor:
    """Return G(t) = targets(t) + weight(t) G(t+1), from the last step back; `targets` is overwritten."""
    steps = list(zip(targets.split(packing.batch_sizes), weight.split(packing.batch_sizes), strict=True))
    later = steps.pop()[0]
    for now, share in reversed(steps):  # episodes that are longer come first in each block
        now[: len(later)].addcmul_(share[: len(later)], later)
        later = now
    return targets


def by_doubling(targets: Tensor, weight: Tensor, packing: Packing) -> Tensor:
    """Return the same in about log2(T) rounds of a few operations, for devices on which T dependent ones take long.

    Each round doubles the number of steps that a row has summed up: with p(t) the row of the next step,
    G(t) = a(t) + w(t) G(p(t)) = a(t) + w(t) a(p(t)) + w(t) w(p(t)) G(p(p(t))) (Hillis and Steele 1986).

    targets, weight: [S, ...]; weight is 0 in closing rows.
    """
    after = packing.next_row.to(targets.device, non_blocking=True)
    for _ in range((packing.n_steps - 1).bit_length()):
        targets = torch.addcmul(targets, weight, targets[after])
        weight, after = weight * weight[after], after[after]
    return targets
