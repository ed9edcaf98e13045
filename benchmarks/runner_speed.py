"""Environment steps per second of whole runners on the same battles: ours beside PyMARL3's and EPyMARL's.

    OMP_NUM_THREADS=1 python benchmarks/runner_speed.py --maps 3m 5m_vs_6m [--pymarl3 CHECKOUT] [--epymarl CHECKOUT]
        [--battles 1 4 16 64 256] [--most-processes 32] [--rows FILE]

PyMARL3 and EPyMARL have no simulator without StarCraft II. What is compared is a runner with its environment: play
random available actions until every battle of a round has ended, and keep the episodes. No agent computes anything.

- `skirmish`, `smax`: our runner over a batch of battles, by the kernels, and JaxMARL's SMAX. Rows of `reference` are of
  the simulator in NumPy, until 0.2.0.
- `PyMARL3`, `EPyMARL`: their parallel runner with one process for each battle of `skirmish`, which the same kernels
  play one at a time. `..., one process`: their episode runner.

Each contestant has a process of its own and one thread in each process; they take turns. CPU seconds are those of all
processes of a contestant. On one core wall time is CPU time or more; with more cores the peers' processes share the
work, but never take less than what their main process computes (`main` in the rows).
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import itertools
import json
import multiprocessing
import os
import sys
import time
import warnings
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from env_speed import show
from qmix_update import scheme

from omagd.config.loading import resolve
from omagd.controllers.scripted_mac import ScriptedPolicy
from omagd.envs.factory import make_env
from omagd.envs.protocol import random_actions
from omagd.envs.smac import make_smac
from omagd.runners import REGISTRY
from omagd.utils.seeding import EpisodeSeeds

OURS = ("skirmish", "smax")
ALONE = ", one process"
Play = Callable[[], int]  # plays a round and returns its steps


class OneBattle:
    """A battle of `skirmish` as PyMARL3's and EPyMARL's runners call it.

    Args:
        map_name: the map. five: `step` returns what Gymnasium's environments do, as EPyMARL expects.
    """

    def __init__(self, map_name: str, five: bool, seed: int = 0, **_: object) -> None:
        self._env, self._five = make_smac("skirmish", map_name=map_name), five
        self._seeds = np.random.default_rng([seed, os.getpid()])
        self.episode_limit = self._env.episode_limit

    def reset(self) -> None:
        """Start a battle from a random seed."""
        self._env.reset(int(self._seeds.integers(2**31)))

    def step(self, actions: Any) -> tuple[Any, ...]:
        """Play a step."""
        reward, ended, info = self._env.step(np.asarray(actions))
        return (None, reward, ended, False, info) if self._five else (reward, ended, info)

    def get_avail_actions(self) -> np.ndarray:
        """Return [n, A], 1 where an action is available: numbers, as SMAC has them."""
        return self._env.get_avail_actions().astype(np.int64)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._env, name)


class RandomMAC:
    """Draws actions as a controller of PyMARL3 and EPyMARL does, without a network."""

    action_selector = SimpleNamespace()

    def __init__(self) -> None:
        self._rng = np.random.default_rng(0)

    def init_hidden(self, batch_size: int) -> None:
        """Do nothing: there is no memory."""

    def select_actions(self, batch: Any, t_ep: int, t_env: int, bs: Any = slice(None), test_mode: bool = False) -> Any:
        """Return [b, n] actions, uniform over the available ones of the battles `bs` at step `t_ep`."""
        return torch.from_numpy(random_actions(batch["avail_actions"][bs, t_ep].numpy() > 0, self._rng))


def ours(name: str, map_name: str, battles: int) -> tuple[Play, list[int]]:
    """Return our runner's round, and no worker processes."""
    env = make_env(name, {"map_name": map_name}, battles, processes=False)
    config = resolve("qmix", "smax" if name == "smax" else "skirmish", {"env_args.map_name": map_name})
    runner = REGISTRY.get("parallel")(env, config, env.info, EpisodeSeeds(0, "train"))
    policy = ScriptedPolicy(env, (), 0.0, np.random.default_rng(0))
    return lambda: runner.collect(policy, explore=None).steps, []


def peers(name: str, path: Path, map_name: str, battles: int) -> tuple[Play, list[int]]:
    """Return a round of a peer's runner, and the numbers of its worker processes."""
    info = make_env("skirmish", {"map_name": map_name}, 1, processes=False).info
    five = name.startswith("EPyMARL")
    envs: Any = ModuleType("envs")  # their own needs the game or other packages
    envs.REGISTRY = {"battle": partial(OneBattle, map_name=map_name, five=five)}
    envs.register_smac = envs.register_smacv2 = lambda: None
    sys.modules["envs"] = envs
    sys.path.insert(0, str(path / "src"))
    args = SimpleNamespace(
        env="battle", env_args={"seed": 0}, batch_size_run=battles, evaluate=False, render=False, use_cuda=False,
        cpu_inference=True, buffer_cpu_only=True, device="cpu", test_nepisode=32, runner_log_interval=10**12,
        common_reward=True, reward_scalarisation="sum",
    )  # fmt: skip
    one_hot = importlib.import_module("components.transforms").OneHot(out_dim=info.n_actions)
    logger = SimpleNamespace(log_stat=lambda *_: None, console_logger=None)
    if name.endswith(ALONE):
        runner = importlib.import_module("runners.episode_runner").EpisodeRunner(args, logger)
    else:
        runner = importlib.import_module("runners.parallel_runner").ParallelRunner(args, logger)
    preprocess = {"actions": ("actions_onehot", [one_hot])}
    runner.setup(scheme(info, torch.float32), {"agents": info.n_agents}, preprocess, RandomMAC())
    runner.log_train_stats_t = 0

    def play() -> int:
        before = runner.t_env
        with torch.no_grad():
            runner.run(test_mode=False)
        return int(runner.t_env - before)

    return play, [process.pid for process in getattr(runner, "ps", [])]


def cpu_of(process: int) -> float:
    """Return the CPU seconds of a process of this machine."""
    return int(Path(f"/proc/{process}/schedstat").read_text().split()[0]) / 1e9


def serve(asking: Connection, pipe: Connection, name: str, path: Path | None, map_name: str, battles: int) -> None:
    """Play as long as numbers of steps come: answer the steps, wall and CPU seconds, and those of this process."""
    asking.close()  # the end of the process that asks: when it dies, this one ends too
    warnings.simplefilter("ignore")
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        play, workers = ours(name, map_name, battles) if path is None else peers(name, path, map_name, battles)
        play()
        pipe.send("ready")
        while wanted := pipe.recv():
            wall, main, others = time.perf_counter(), time.process_time(), sum(map(cpu_of, workers))
            steps = 0
            while steps < wanted:
                steps += play()
            main = time.process_time() - main
            cpu = main + sum(map(cpu_of, workers)) - others
            pipe.send({"steps": steps, "wall": time.perf_counter() - wall, "cpu": cpu, "main": main})


class Contestant:
    """A process that plays rounds when asked."""

    def __init__(self, name: str, path: Path | None, map_name: str, battles: int) -> None:
        context = multiprocessing.get_context("fork")  # what is imported and compiled is there
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=serve, args=(self._pipe, theirs, name, path, map_name, battles))
        self._process.start()
        theirs.close()
        self._pipe.recv()
        self._speed = 0.0

    def play(self, seconds: float) -> dict[str, float]:
        """Play for about so many CPU seconds, the first time one round."""
        self._pipe.send(max(1, int(self._speed * seconds)))
        answer: dict[str, float] = self._pipe.recv()
        self._speed = answer["steps"] / answer["cpu"]
        return answer

    def close(self) -> None:
        """End the process, and with it its workers."""
        self._pipe.send(0)
        self._process.join()


def contestants(options: argparse.Namespace, battles: int) -> dict[str, Path | None]:
    """Return the names of those that play so many battles, and the checkouts of peers."""
    chosen: dict[str, Path | None] = dict.fromkeys(options.ours)
    given = {"PyMARL3": options.pymarl3, "EPyMARL": options.epymarl}
    for name, path in ((name, path) for name, path in given.items() if path and battles <= options.most_processes):
        chosen[name] = path
        if battles == 1:
            chosen[name + ALONE] = path
    return chosen


def measure(map_name: str, battles: int, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return a row for each contestant: quartiles of the rounds, steps per second of each clock."""
    players = {n: Contestant(n, p, map_name, battles) for n, p in contestants(options, battles).items()}
    rounds: dict[str, list[dict[str, float]]] = {name: [] for name in players}
    for number in range(options.rounds + 1):
        for name, player in players.items():
            answer = player.play(options.seconds)
            if number:  # the first finds out how many steps fit
                rounds[name].append(answer)
    rows = []
    for name, player in players.items():
        player.close()
        each = {key: np.array([a["steps"] / a[key] for a in rounds[name]]) for key in ("wall", "cpu", "main")}
        quartiles = {key: np.percentile(values, (25, 50, 75)).round().tolist() for key, values in each.items()}
        rows.append({"map": map_name, "battles": battles, "name": name, "steps_per_second": quartiles})
        shown = ", ".join(f"{key} {show(values)}" for key, values in each.items())
        print(f"{map_name}, {battles} battles, {name}: {shown}", flush=True)
    return rows


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--maps", nargs="+", default=["5m_vs_6m"])
    parser.add_argument("--battles", type=int, nargs="+", default=[1, 4, 16, 64, 256])
    parser.add_argument("--ours", nargs="*", default=list(OURS), choices=OURS)
    parser.add_argument("--pymarl3", type=Path, help="a checkout of PyMARL3")
    parser.add_argument("--epymarl", type=Path, help="a checkout of EPyMARL")
    parser.add_argument("--most-processes", type=int, default=32, help="of a peer")
    parser.add_argument("--seconds", type=float, default=1.5, help="of processor time, of a turn of each")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--rows", type=Path, help="JSON lines")
    options = parser.parse_args()
    torch.set_num_threads(1)
    ours("skirmish", "3m", 1)[0]()  # loads the kernels, which other processes inherit
    rows = []
    for name, battles in itertools.product(options.maps, options.battles):
        rows += measure(name, battles, options)
        if options.rows:
            options.rows.write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    main()
