"""Steps per second with environments in processes, beside PyMARL3's ParallelRunner where a checkout is given.

    OMP_NUM_THREADS=1 python benchmarks/rollout_processes.py [--peer PATH_OF_A_PYMARL3_CHECKOUT] [--processes 8]

The environment has the sizes of 5m_vs_6m and costs nothing but the sleep that it is given (0 ms and 2 ms); its episodes
last 10 to 70 steps, 31 on average. Both sides act with a fresh n_rnn agent of 64 units, epsilon 0.05, and keep the
episodes. Ours plays in two ways: rounds of one episode for each environment, as the peer does, and a stream. All take
turns in one run; wall time, medians over the rounds. "ideal" is the number of processes divided by the measured sleep.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from pydantic import BaseModel

from omagd.config.env_info import EnvInfo
from omagd.config.loading import resolve
from omagd.config.schema import Config
from omagd.controllers.basic_mac import NMAC
from omagd.controllers.types import Exploration
from omagd.envs.protocol import MultiAgentEnv
from omagd.envs.workers.process_envs import ProcessEnvs
from omagd.runners import REGISTRY
from omagd.runners.starts import EpisodeSeeds

AGENTS, ACTIONS, OBS, STATE, LIMIT = 5, 12, 55, 98, 70
STORED_RATIO = "PyMARL3: 3,400 to 3,900 steps/s at 0 ms on two cores that are shared"


class SleepArgs(BaseModel):
    """How long a step sleeps, in seconds."""

    seconds: float = 0.0


class Sleep(MultiAgentEnv):
    """Shows constants; an episode's length follows from its seed."""

    args_model = SleepArgs

    def __init__(self, args: SleepArgs) -> None:
        self._seconds = args.seconds
        rng = np.random.default_rng(0)
        self._obs = rng.normal(size=(AGENTS, OBS)).astype(np.float32)
        self._state = rng.normal(size=STATE).astype(np.float32)
        self._avail = np.ones((AGENTS, ACTIONS), np.int64)
        self._rng = np.random.default_rng(os.getpid())
        self._t, self._length = 0, 1

    def reset(self, seed: int | None = None) -> None:
        """Draw a length."""
        rng = self._rng if seed is None else np.random.default_rng(seed)
        self._t, self._length = 0, int(np.clip(rng.gamma(6.0, 5.2), 10, LIMIT))

    def step(self, actions: np.ndarray) -> tuple[float, bool, dict[str, Any]]:
        """Sleep and count."""
        if self._seconds:
            time.sleep(self._seconds)
        self._t += 1
        ended = self._t >= self._length
        return 1.0, ended, {"battle_won": ended} if ended else {}

    def get_obs(self, no_range_limit: bool = False) -> np.ndarray:
        """Show what it always shows."""
        return self._obs

    def get_state(self) -> np.ndarray:
        """Show what it always shows."""
        return self._state

    def get_avail_actions(self) -> np.ndarray:
        """Allow everything."""
        return self._avail

    def get_env_info(self) -> dict[str, Any]:
        """Tell the sizes."""
        sizes = {"n_agents": AGENTS, "n_actions": ACTIONS, "obs_shape": OBS, "state_shape": STATE}
        return {**sizes, "episode_limit": LIMIT}


def config_for(**updates: object) -> Config:
    """Return a QMIX configuration of these sizes."""
    return resolve("qmix", "skirmish", {"env_args.map_name": "5m_vs_6m", **updates})


def ours(seconds: float, processes: int, name: str) -> Callable[[int], int]:
    """Return a function that plays about so many steps with the runner `name` and returns how many it played."""
    env = ProcessEnvs(Sleep, SleepArgs(seconds=seconds), processes)
    config = config_for(runner=name)
    mac = NMAC(config, EnvInfo("skirmish", "5m_vs_6m", AGENTS, ACTIONS, OBS, STATE, LIMIT), torch.device("cpu"))
    runner = REGISTRY.get(name)(env, config, env.info, EpisodeSeeds(0, name))
    explore = Exploration(0.05, np.random.default_rng(0))

    def play(wanted: int) -> int:
        steps = 0
        while steps < wanted:
            steps += runner.collect(mac, explore=explore).steps
        return steps

    return play


def peer(path: Path, seconds: float, processes: int) -> Callable[[int], int]:
    """Return a function that plays with PyMARL3's runner; its workers are forked and are daemons."""
    sys.path.insert(0, str(path / "src"))
    with contextlib.redirect_stdout(io.StringIO()):
        importlib.import_module("envs").REGISTRY["sleep"] = lambda **args: Sleep(SleepArgs(**args))
        runner_class = importlib.import_module("runners.parallel_runner").ParallelRunner
    one_hot = importlib.import_module("components.transforms").OneHot
    mac_class = importlib.import_module("controllers.n_controller").NMAC
    args = SimpleNamespace(
        env="sleep", env_args={"seconds": seconds}, batch_size_run=processes, evaluate=False, use_cuda=False,
        cpu_inference=True, buffer_cpu_only=True, device="cpu", test_nepisode=32, runner_log_interval=10**12,
        agent="n_rnn", n_agents=AGENTS, n_actions=ACTIONS, rnn_hidden_dim=64, obs_agent_id=True, obs_last_action=True,
        agent_output_type="q", action_selector="epsilon_greedy", epsilon_start=0.05, epsilon_finish=0.05,
        epsilon_anneal_time=100, test_noise=False, use_layer_norm=False, use_orthogonal=False, mask_before_softmax=True,
    )  # fmt: skip
    scheme = {
        "state": {"vshape": STATE},
        "obs": {"vshape": OBS, "group": "agents"},
        "actions": {"vshape": (1,), "group": "agents", "dtype": torch.long},
        "avail_actions": {"vshape": (ACTIONS,), "group": "agents", "dtype": torch.int},
        "reward": {"vshape": (1,)},
        "terminated": {"vshape": (1,), "dtype": torch.uint8},
    }
    groups = {"agents": AGENTS}
    onehot = {"actions": ("actions_onehot", [one_hot(out_dim=ACTIONS)])}
    batch_class = importlib.import_module("components.episode_buffer").EpisodeBatch
    logger = SimpleNamespace(log_stat=lambda *_: None, console_logger=None)
    with contextlib.redirect_stdout(io.StringIO()):
        runner = runner_class(args, logger)
        whole = batch_class(scheme, groups, 1, LIMIT + 1, preprocess=onehot).scheme
        runner.setup(scheme=scheme, groups=groups, preprocess=onehot, mac=mac_class(whole, groups, args))
    runner.log_train_stats_t = 0

    def play(wanted: int) -> int:
        begun = runner.t_env
        with torch.no_grad():
            while runner.t_env - begun < wanted:
                runner.run(test_mode=False)
        return runner.t_env - begun

    return play


def measured_sleep(seconds: float) -> float:
    """Return how long such a sleep lasts on this machine."""
    started = time.perf_counter()
    for _ in range(100):
        time.sleep(seconds)
    return (time.perf_counter() - started) / 100


def row(seconds: float, options: argparse.Namespace) -> None:
    """Measure and print one row."""
    works = {
        "rounds": ours(seconds, options.processes, "parallel"),
        "stream": ours(seconds, options.processes, "stream"),
    }
    if options.peer:
        works["PyMARL3"] = peer(options.peer, seconds, options.processes)
    wanted = int(options.steps / (1 + 3 * (seconds > 0)))
    speeds: dict[str, list[float]] = {name: [] for name in works}
    for play in works.values():
        play(wanted // 4)
    for _ in range(options.rounds):
        for name, play in works.items():
            started = time.perf_counter()
            speeds[name].append(play(wanted) / (time.perf_counter() - started))
    ideal = options.processes / measured_sleep(seconds) if seconds else 0.0
    print(f"{options.processes} processes, {seconds * 1e3:.0f} ms a step" + (f", ideal {ideal:,.0f}" if ideal else ""))
    for name, values in speeds.items():
        line = f"  {name:18s} {statistics.median(values):8,.0f} steps/s"
        if ideal:
            line += f"  {statistics.median(values) / ideal:5.2f} of the ideal"
        if options.peer and name != "PyMARL3":
            ratio = statistics.median(a / b for a, b in zip(values, speeds["PyMARL3"], strict=True))
            line += f"  {ratio:5.2f} x PyMARL3"
        print(line, flush=True)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", type=Path, help="a checkout of PyMARL3")
    parser.add_argument("--processes", type=int, default=8)
    parser.add_argument("--milliseconds", type=float, nargs="+", default=[0.0, 2.0])
    parser.add_argument("--steps", type=int, default=12_000, help="of one turn; a quarter where the environment sleeps")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    for milliseconds in options.milliseconds:
        row(milliseconds / 1e3, options)
    if not options.peer:
        print(STORED_RATIO)


if __name__ == "__main__":
    main()
