"""Data sources of learners: a replay buffer, or the episodes that were collected last, one by one or in groups."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from omagd.components.episode_buffer import EpisodeBuffer
from omagd.config.schema import Config
from omagd.utils.packing import UNKNOWN, WEIGHT, Episode, PackedBatch, RecordedEpisode, meta_of

Read = Callable[[Sequence[int]], Any]
"""Returns what a learner takes, from the places of episodes in a buffer."""

LEAST = 1e-6  # priority beside the error: an episode without one can be drawn again


class ReplayData:
    """Batches sampled from the episodes of a buffer, the newest ones, which are learned from many times.

    Args:
        config: the run. rng: for the draws. read: returns what the learner takes, from the places of drawn episodes.

    Attributes:
        log_name: of the episodes in checkpoints. sampled: whether episodes serve several batches, drawn at random.
        wants_more: whether this iteration must collect more episodes.
    """

    log_name: ClassVar[str] = "replay"
    sampled: ClassVar[bool] = True
    wants_more = False

    def __init__(self, config: Config, rng: np.random.Generator, buffer: EpisodeBuffer, read: Read) -> None:
        self.batches_per_iteration = config.updates_per_iteration
        self.buffer, self._read = buffer, read
        self._batch_size, self._rng = config.batch_size, rng

    def add(self, episodes: Iterable[Episode]) -> None:
        """Store episodes; each replaces the oldest one once the buffer is full."""
        self.buffer.add(episodes)

    def expect(self, episodes: int, batch_size: int) -> None:
        """Sample `batch_size` episodes from here on, but no more than the buffer can hold."""
        self._batch_size = min(batch_size, self.buffer.capacity)

    @property
    def ready(self) -> bool:
        """Whether there are `batch_size` episodes; once true, it stays true while that number stays."""
        return len(self.buffer) >= self._batch_size

    def batches(self) -> Iterator[Any]:
        """Yield `updates_per_iteration` batches of `batch_size` episodes."""
        draws = (self.buffer.draw(self._batch_size, self._rng) for _ in range(self.batches_per_iteration))
        return map(self._read, draws)


class PrioritisedReplay(ReplayData):
    """`ReplayData` that draws an episode the more often, the larger its error was when it was last learned from.

    Schaul et al. 2016 (arXiv:1511.05952, section 3.3 and 3.4), by episodes: P(i) = p_i^α / sum_j p_j^α, where p_i is
    what `errors` returns, and for a new episode the largest one that is stored. The weights (1 / (N P(i)))^β correct
    for it. The loss is their weighted mean, so it needs no largest weight, which ranks would have to agree on.

    Args:
        config, rng, buffer: as there. read: returns packed batches. errors: of the episodes of the last batch.
    """

    def __init__(
        self, config: Config, rng: np.random.Generator, buffer: EpisodeBuffer, read: Read, errors: Callable[[], Tensor]
    ) -> None:
        super().__init__(config, rng, buffer, read)
        self._alpha, self._beta, self._errors = config.per_alpha, config.per_beta, errors
        self.priorities = np.empty(0)  # oldest first; without those of episodes that a resumed run has from elsewhere

    def add(self, episodes: Iterable[Episode]) -> None:
        """Store episodes as the likeliest ones."""
        before = self.buffer.added
        super().add(episodes)
        self._follow(self.buffer.added - before)

    def _follow(self, added: int = 0) -> None:
        """Let there be a priority for each stored episode, of which so many are new."""
        known, stored = self.priorities, len(self.buffer)
        fill = known.max() if len(known) else 1.0
        lacking = max(0, stored - len(known) - added)
        self.priorities = np.pad(known, (lacking, added), constant_values=fill)[-stored:]

    def batches(self) -> Iterator[PackedBatch]:
        """Yield `updates_per_iteration` batches with `weight` in each row; each is learned from before the next."""
        self._follow()
        for _ in range(self.batches_per_iteration):
            shares = self.priorities**self._alpha
            upto = shares.cumsum()
            # One from each of equal parts of the sum, as in their appendix B.2.1.
            places = (np.arange(self._batch_size) + self._rng.random(self._batch_size)) / self._batch_size * upto[-1]
            drawn = upto.searchsorted(places, side="right").clip(max=len(upto) - 1)
            batch: PackedBatch = self._read(drawn.tolist())
            drawn = drawn[[*batch.sample_index]]
            weights = (len(shares) * shares[drawn] / upto[-1]) ** -self._beta
            rows = torch.from_numpy(weights.astype(np.float32))[batch.packing.episode]
            yield replace(batch, data={**batch.data, WEIGHT: rows.to(batch.device)})
            found = self._errors().cpu().numpy()
            self.priorities[drawn] = np.where(np.isfinite(found), found + LEAST, self.priorities[drawn])


class OnPolicyData:
    """One batch per iteration with all episodes collected for it, at least `batch_size`; then they are discarded.

    Between two iterations it holds at most the episodes that had to be finished before a test (`runner=stream`). They
    are part of the next batch, and of checkpoints.

    Args:
        config: the run. buffer: without limit. read: returns what the learner takes, from the places of all episodes.
    """

    log_name: ClassVar[str] = "on_policy"
    sampled: ClassVar[bool] = False
    batches_per_iteration = 1

    def __init__(self, config: Config, buffer: EpisodeBuffer, read: Read) -> None:
        self.quota = config.batch_size
        self.buffer, self._read = buffer, read

    def add(self, episodes: Iterable[Episode]) -> None:
        """Add episodes to the batch of this iteration."""
        self.buffer.add(episodes)

    def expect(self, episodes: int, batch_size: int) -> None:
        """Let the batch of this iteration have `episodes`, whatever `batch_size` is."""
        self.quota = episodes

    @property
    def wants_more(self) -> bool:
        """Whether fewer episodes have been collected than the `quota` of this iteration."""
        return len(self.buffer) < self.quota

    @property
    def ready(self) -> bool:
        """Whether the `quota` has been collected."""
        return not self.wants_more

    def batches(self) -> Iterator[Any]:
        """Yield all episodes as one batch and forget them."""
        batch = self._read(range(len(self.buffer)))
        self.buffer.forget()
        yield batch


class GroupData(OnPolicyData):
    """One batch per iteration of whole groups, which never cross ranks.

    A leave-one-out advantage of a group in which all have won, or none has, is 0. With `enable_dynamic_sampling` such
    groups are dropped, and further rounds are played for others (DAPO, Yu et al. 2025, arXiv:2503.14476, section 3.2).
    What counts is the outcome, by exact equality: never a shaped return, by which a group that has lost still looks
    mixed. Groups are kept or dropped as a whole: without its only loser a group would say nothing.

    A rank stops when it has its groups, or after `max_sampling_attempts` rounds more than it needs at least. It stops
    between rounds only: ending one would prefer short episodes.

    Args:
        config, buffer, read: as there.

    Attributes:
        again: the tasks of the groups that the last round has lost.
    """

    def __init__(self, config: Config, buffer: EpisodeBuffer, read: Read) -> None:
        super().__init__(config, buffer, read)
        self._drops = config.enable_dynamic_sampling
        self._wanted = math.ceil(config.batch_size / config.group_size)
        self._least_rounds = math.ceil(self._wanted * config.group_size / config.batch_size_run)
        self._attempts = config.max_sampling_attempts * self._drops
        self._rounds = self._kept = self._dropped = 0
        self._dealt = False
        self.again: list[int] = []
        self._blank: Episode = {}

    def begin(self) -> None:
        """Begin an iteration."""
        self._rounds = self._kept = self._dropped = 0

    def expect(self, episodes: int, batch_size: int) -> None:
        """Want as many groups in this iteration as its first round plays: the starts that are this rank's."""
        self._dealt = True

    def add(self, episodes: Iterable[Episode]) -> None:
        """Add the groups of one round."""
        groups: dict[str, list[Episode]] = {}
        played = list(episodes)
        for episode in played:
            groups.setdefault(meta_of(episode).group, []).append(episode)
        kept = set()
        for name, group in groups.items():
            outcomes = [meta_of(episode).outcome for episode in group]
            # NaN, an unknown outcome, equals nothing.
            if not self._drops or any(outcome != outcomes[0] for outcome in outcomes):
                kept.add(name)
        self.again = [meta_of(group[0]).task for name, group in groups.items() if name not in kept]
        self._rounds += 1
        if self._dealt and self._rounds == 1:
            self._wanted, self._least_rounds = len(groups), 1
        self._kept += len(kept)
        self._dropped += len(self.again)
        if played:
            self._blank = {name: rows[:1] for name, rows in played[0].items()}
        super().add(episode for episode in played if meta_of(episode).group in kept)

    @property
    def wants_more(self) -> bool:
        """Whether this iteration must collect another round."""
        return self._kept < self._wanted and self._rounds < self._least_rounds + self._attempts

    @property
    def ready(self) -> bool:
        """Whether there is a group."""
        return len(self.buffer) > 0

    def batches(self) -> Iterator[Any]:
        """Yield all groups as one batch and forget them; without any, an episode of no steps."""
        if not self.ready:  # its only row is a closing row, which has no action and so no sample
            super().add([RecordedEpisode(self._blank, UNKNOWN)])
        yield from super().batches()

    def stats(self) -> dict[str, tuple[float, float]]:
        """Return the share of this iteration's groups that were dropped, as (sum, count)."""
        return {"groups_dropped": (self._dropped, self._kept + self._dropped)} if self._drops else {}


DataSource = ReplayData | OnPolicyData
"""Where the batches of this rank come from."""
