"""Battles, rollouts and training that stay in a device's memory: environment steps per second.

    python benchmarks/resident.py --device cuda [--map 5m_vs_6m] [--slots 1024 4096 16384] [--rounds 5] [--updates 4]
    python benchmarks/resident.py --device cuda --config omagd_small        (untrained modules reconstruct)
    python benchmarks/resident.py --device cuda --env smax --map 3m         (JAX for CUDA; no row of battles alone)
    python benchmarks/resident.py --device cuda --slots 16384 -- resident_slots=4096
    python benchmarks/resident.py --device cpu --slots 64 --rounds 2        (a trial without a GPU)

For each number of episodes of a round, played at once unless `resident_slots` is less, one JSON line with the medians
of the rounds in steps per second of the wall clock:

    battles     observed (everything), random available actions, played, restarted; no agent
    played      whole rounds of `runner=resident` with the agents of `--config`
    trained     the same, stored in the replay on the device, then so many updates of `batch_size` episodes, of fixed
                shapes (`graph_updates`), which are CUDA graphs on a GPU

Also seconds of one update, and megabytes of the device. Without the device, it prints `not run`.
`qmix_update.py --device cuda --peer PATH` times updates beside PyMARL3's.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import yaml

from omagd import controllers, runners
from omagd.components.action_selectors import EpsilonGreedy
from omagd.components.data import ReplayData
from omagd.config.env_info import EnvInfo
from omagd.config.loading import resolve
from omagd.config.schema import Config
from omagd.controllers.types import Exploration
from omagd.envs.battle.args import SkirmishArgs
from omagd.envs.battle.compiled.resident import ResidentBattles
from omagd.envs.battle.maps import get_map
from omagd.envs.factory import make_env
from omagd.learners.nq_learner import NQLearner
from omagd.modules.graph_reconstructers.token_reconstructor import TokenReconstructor
from omagd.resident.graphs import Captured
from omagd.resident.replay import ResidentBuffer
from omagd.resident.updates import FixedUpdates
from omagd.run.training.build import new_predictor, new_tokenizer
from omagd.utils.dist_utils import Dist
from omagd.utils.seeding import EpisodeSeeds

WARM_UP = 3  # rounds
TICKS = 100  # of a round of battles without agents


def timed(work: Callable[[], Any]) -> tuple[float, Any]:
    """Return the seconds of the wall clock until the device has done `work`, and its result."""
    wait = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None
    wait()
    started = time.perf_counter()
    result = work()
    wait()
    return time.perf_counter() - started, result


@torch.no_grad()
def battles_alone(name: str, slots: int, device: torch.device) -> Callable[[], int]:
    """Return what plays `TICKS` ticks of all battles, and returns its steps."""
    battles = ResidentBattles(get_map(name), SkirmishArgs(map_name=name), slots, device)
    everyone = torch.ones(slots, dtype=torch.bool, device=device)
    seed, always = torch.arange(slots, device=device), torch.ones((), dtype=torch.float64, device=device)
    step, choose = torch.zeros_like(seed), EpsilonGreedy().on_device
    battles.reset(everyone, seed)

    def tick() -> None:
        shown = battles.observe(full=True)
        nothing = torch.zeros(shown.avail.shape, device=device)
        actions, _ = choose(nothing, shown.avail, always, seed, step)
        over = battles.step(actions, everyone).over
        step.add_(1)
        seed.add_(over * slots)
        battles.reset(over, seed)

    run = Captured(tick, device)

    def play() -> int:
        for _ in range(TICKS):
            run()
        return TICKS * slots

    return play


def untrained(config: Config, info: EnvInfo, device: torch.device) -> TokenReconstructor | None:
    """Return a reconstructor with random weights where the configuration has one: its work has fixed shapes."""
    if not config.use_graph_reconstruction:
        return None
    tokenizer, predictor = new_tokenizer(config, info, device), new_predictor(config, info, device)
    predictor.bind(tokenizer.table())
    return TokenReconstructor(tokenizer, predictor, config, info)


class Training:
    """The runner with its controller, replay and learner.

    Args:
        slots: battles. arguments: as of the command line.
    """

    def __init__(self, slots: int, arguments: argparse.Namespace) -> None:
        device = torch.device(arguments.device)
        sizes = {"batch_size_run": slots, "batch_size": arguments.batch, "updates_per_iteration": arguments.updates}
        updates = {"runner": "resident", "buffer_cpu_only": False, "buffer_size": max(5000, 2 * slots), **sizes}
        updates["env_args.map_name"] = arguments.map
        for word in arguments.keys:
            key, _, value = word.partition("=")
            updates[key] = yaml.safe_load(value)
        if arguments.env == "smax":
            updates["env_args.jax_platform"] = device.type
        config = resolve(config=arguments.config, env_config=arguments.env, updates=updates)
        env = make_env(config.env, dict(config.env_args), slots, processes=False)
        torch.manual_seed(0)
        self.mac = controllers.REGISTRY.get(config.mac)(config, env.info, device, untrained(config, env.info, device))
        self.learner = NQLearner(self.mac, config, env.info, Dist(device=device))
        self.learns = FixedUpdates(self.learner)
        buffer = ResidentBuffer(config.buffer_size, device, env.info.episode_limit + 1)
        self.data = ReplayData(config, np.random.default_rng(0), buffer, buffer.fixed)
        self.runner = runners.REGISTRY.get("resident")(env, config, env.info, EpisodeSeeds(1, "train"))
        self.explore = Exploration(0.5, np.random.default_rng(0))

    def play(self) -> int:
        """Play a round and return its steps."""
        return self.runner.collect(self.mac, explore=self.explore).steps

    def learn(self) -> int:
        """Play and store a round, learn from batches, and return the steps that were played."""
        steps = 0
        while not steps or not self.data.ready:
            rollout = self.runner.collect(self.mac, explore=self.explore)
            self.data.add(rollout.episodes)
            steps += rollout.steps
        self.update()
        return steps

    def update(self) -> None:
        """Learn from the batches of an iteration."""
        for batch in self.data.batches():
            self.learns.update(batch, episodes=0)


def speed(work: Callable[[], int], rounds: int) -> float:
    """Return the median steps per second after a few rounds, in which kernels are compiled and graphs captured."""
    for _ in range(WARM_UP):
        work()
    found = []
    for _ in range(rounds):
        seconds, steps = timed(work)
        found.append(steps / seconds)
    return statistics.median(found)


def measure(slots: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the row of one number of battles."""
    device, rounds = torch.device(arguments.device), arguments.rounds
    row: dict[str, Any] = {"config": arguments.config, "env": arguments.env, "map": arguments.map}
    row |= {"episodes": slots, **({"keys": arguments.keys} if arguments.keys else {})}
    if arguments.env == "skirmish":
        row["battles"] = round(speed(battles_alone(arguments.map, slots, device), rounds))
    training = Training(slots, arguments)
    row["played"] = round(speed(training.play, rounds))
    row["trained"] = round(speed(training.learn, rounds))
    seconds = statistics.median(timed(training.update)[0] for _ in range(rounds))
    row["update_seconds"] = round(seconds / arguments.updates, 5)
    if device.type == "cuda":
        row["megabytes"] = round(torch.cuda.max_memory_allocated(device) / 2**20)
    return row


def main() -> None:
    """Print a row for each number of battles."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=("cpu", "cuda"))
    parser.add_argument("--map", default="5m_vs_6m")
    parser.add_argument("--config", default="qmix", help="qmix, gnn_qmix, omagd_small, ...")
    parser.add_argument("--env", default="skirmish", choices=("skirmish", "smax"))
    parser.add_argument("--slots", type=int, nargs="+", default=[1024, 4096, 16384], help="battles at once")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--batch", type=int, default=128, help="episodes of an update")
    parser.add_argument("--updates", type=int, default=4, help="of a round")
    parser.add_argument(
        "keys", nargs="*", metavar="key=value", help="of the configuration, such as resident_slots=4096"
    )
    arguments = parser.parse_args()
    if arguments.device == "cuda" and not torch.cuda.is_available():
        print("not run: there is no CUDA device")
        return
    torch.set_num_threads(1)
    torch.backends.cudnn.allow_tf32 = False  # as runs do
    for slots in arguments.slots:
        print(json.dumps(measure(slots, arguments)), flush=True)


if __name__ == "__main__":
    main()
