"""On-policy data in groups of episodes with one start, of which a rank may have none."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator

from omagd.components.data import OnPolicyData
from omagd.config.schema import Config
from omagd.utils.dist_utils import Dist
from omagd.utils.packing import Episode, EpisodeMeta, PackedBatch, RecordedEpisode, meta_of, pack_episodes


class GroupData(OnPolicyData):
    """One batch per iteration of whole groups, which never cross ranks.

    A leave-one-out advantage of a group in which all have won, or none has, is 0. With `enable_dynamic_sampling` such
    groups are dropped, and further rounds are played for others (DAPO, Yu et al. 2025, arXiv:2503.14476, section 3.2).
    What counts is the outcome, by exact equality: never a shaped return, by which a group that has lost still looks
    mixed. Groups are kept or dropped as a whole: without its only loser a group would say nothing.

    A rank stops when it has its groups, after `max_sampling_attempts` rounds more than it needs at least, or when the
    share `early_stop_percentage` of the groups that all ranks want is there. It stops between rounds only: ending one
    would prefer short episodes.

    Args:
        config: the run. dist: the ranks, and the device of the learner.

    Attributes:
        ended: called with the origin and the outcomes of each group that was played.
        again: the tasks of the groups that the last round has lost.
    """

    def __init__(self, config: Config, dist: Dist) -> None:
        super().__init__(config, dist.device)
        self.ended: Callable[[EpisodeMeta, list[float]], None] = lambda meta, outcomes: None
        self._drops = config.enable_dynamic_sampling
        self._wanted = math.ceil(config.batch_size / config.group_size)
        self._least_rounds = math.ceil(self._wanted * config.group_size / config.batch_size_run)
        self._attempts = config.max_sampling_attempts * self._drops
        self._enough = math.ceil(config.early_stop_percentage * self._wanted * dist.world_size)
        self._counted = config.early_stop_percentage < 1.0  # otherwise nothing depends on how fast a rank is
        self._dist = dist
        self._iteration = self._rounds = self._kept = self._dropped = 0
        self._stop = self._dealt = False
        self.again: list[int] = []
        self._blank: Episode = {}

    def begin(self) -> None:
        """Begin an iteration."""
        self._rounds = self._kept = self._dropped = 0
        self._stop = False
        if self._counted and self._dist.is_main and self._iteration > 1:
            # All ranks have read it, since they have met at the end of the iteration after it.
            self._dist.store.delete_key(self._counter(self._iteration - 1))
        self._iteration += 1

    def expect(self, episodes: int, batch_size: int) -> None:
        """Want as many groups in this iteration as its first round plays: the starts that this rank was dealt."""
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
            self.ended(meta_of(group[0]), outcomes)
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
        if self._counted:
            self._stop = self._dist.store.add(self._counter(self._iteration), len(kept)) >= self._enough

    @staticmethod
    def _counter(iteration: int) -> str:
        return f"groups/{iteration}"

    @property
    def wants_more(self) -> bool:
        """Whether this iteration must collect another round."""
        return self._kept < self._wanted and self._rounds < self._least_rounds + self._attempts and not self._stop

    @property
    def ready(self) -> bool:
        """Whether there is a group."""
        return len(self.buffer) > 0

    def batches(self) -> Iterator[PackedBatch]:
        """Yield all groups as one batch and forget them; without any, an episode of no steps."""
        if self.ready:
            yield from super().batches()
        else:  # its only row is a closing row, which has no action and so no sample
            yield pack_episodes([RecordedEpisode(self._blank, EpisodeMeta())]).to(self._device)

    def stats(self) -> dict[str, tuple[float, float]]:
        """Return the share of this iteration's groups that were dropped, as (sum, count)."""
        return {"groups_dropped": (self._dropped, self._kept + self._dropped)} if self._drops else {}
