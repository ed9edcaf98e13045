"""How evenly ranks are busy when several maps are dealt to them.

All ranks are played in this process, each with its own environments and policy: the rank whose clock is behind makes
the next step, which moves its clock by the processor time of that step. So other load on the machine does not matter,
and a queue is drawn from in the order in which real ranks would. An iteration lasts as long as its busiest rank.

    python benchmarks/task_balance.py --ranks 4
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from omagd.config.loading import resolve
from omagd.config.schema import Config
from omagd.controllers.types import Exploration
from omagd.envs.factory import make_env
from omagd.run.training.build import build_plain_mac
from omagd.run.training.tasks import TrainingTasks, episode_starts
from omagd.runners import REGISTRY
from omagd.runners.rollout import RolloutLoop
from omagd.utils.dist_utils import Dist, Store

MAPS = ["3m", "4m", "5m", "8m", "10m_vs_11m", "13m_vs_15m", "20m", "27m_vs_30m"]
DEALINGS: dict[str, dict[str, Any]] = {
    "round robin": {},
    "sharded in the order of the maps": {"task_dealing": "sharded", "balance_tasks_across_gpus": False},
    "sharded, balanced": {"task_dealing": "sharded"},
    "queue": {"task_dealing": "queue"},
}


@dataclass(frozen=True)
class OneOfMany(Dist):
    """A rank whose exchanges are served from a list that all ranks have filled before, and whose store is common."""

    board: list[Any] = field(default_factory=list)

    @property
    def store(self) -> Store:
        """The store that was given."""
        return self._own

    def gather(self, value: Any) -> list[Any]:
        """Return what all ranks have put on the board."""
        return list(self.board)


class Rank:
    """Environment, policy and share of the maps of one rank. dist: its place. config: the run."""

    def __init__(self, config: Config, dist: Dist) -> None:
        self.env = make_env(config.env, dict(config.env_args), config.batch_size_run, processes=False)
        info = self.env.info
        starts = episode_starts(config, info, "train", dist.rank)
        self.busy = 0.0
        self.maps = TrainingTasks(
            config, info, dist, starts, config.batch_size_run, lambda: self.env.seconds, lambda: self.busy
        )
        self.runner = REGISTRY.get(config.runner)(self.env, config, info, starts)
        self.mac = build_plain_mac(config, info, torch.device("cpu"))
        self.explore = Exploration(0.5, np.random.default_rng(dist.rank))

    def begin(self, data: Any) -> None:
        """Start an iteration."""
        self.busy = 0.0
        self.maps.deal(data)
        self.maps.begin()
        self.loop: RolloutLoop = self.runner._loop(self.mac, full_obs=False, keep=True)
        self._spend(lambda: self.loop.begin(self.runner.stream.per_round))

    def step(self) -> None:
        """Play one step of all slots."""
        self._spend(lambda: self.loop.tick(self.explore))

    def _spend(self, work: Any) -> None:
        began = time.process_time()
        work()
        self.busy += time.process_time() - began


class Data:
    """A replay, for which one round is an iteration."""

    sampled = True

    def expect(self, episodes: int, batch_size: int) -> None:
        """Do nothing."""


def measured(config: Config, n_ranks: int, iterations: int, before: int) -> np.ndarray:
    """Return the busy seconds of each rank in each iteration after the first `before` ones, [iterations, W]."""
    board: list[Any] = []
    store = Dist().store
    ranks = [Rank(config, OneOfMany(r, n_ranks, board=board, _own=store)) for r in range(n_ranks)]
    rows = []
    for i in range(before + iterations):
        for rank in ranks:
            rank.begin(Data())
        while open_ranks := [rank for rank in ranks if not rank.loop.over]:
            min(open_ranks, key=lambda rank: rank.busy).step()
        for rank in ranks:
            rank.maps.played(rank.loop.take().log)
        rows.append([rank.busy for rank in ranks])
        if i + 1 == before:  # one exchange, and one rebalancing
            board[:] = [rank.maps.tally.own.state_dict() for rank in ranks]
            for rank in ranks:
                rank.maps.synchronise()
    for rank in ranks:
        rank.env.close()
    return np.array(rows[before:])


def main() -> None:
    """Measure every dealing and print a row for each."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--maps", nargs="+", default=MAPS)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--slots", type=int, default=8)
    parser.add_argument("--iterations", type=int, default=10)
    parser.add_argument("--before", type=int, default=5, help="iterations before the one rebalancing")
    options = parser.parse_args()
    torch.set_num_threads(1)
    print("| dealing | busiest rank above the mean, whole time | idle time of an iteration | seconds per iteration |")
    print("|---|---|---|---|")
    for name, updates in DEALINGS.items():
        sizes = {"batch_size_run": options.slots, "env_args.map_name": options.maps, "use_cuda": False}
        config = resolve("hpn_qmix", "skirmish", {**sizes, **updates})
        busy = measured(config, options.ranks, options.iterations, options.before)
        total, longest = busy.sum(0), busy.max(1)
        idle = 1 - busy.mean(1).sum() / longest.sum()
        print(f"| {name} | {total.max() / total.mean() - 1:.1%} | {idle:.1%} | {longest.mean():.2f} |", flush=True)


if __name__ == "__main__":
    main()
