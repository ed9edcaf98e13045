"""Time one QMIX update at the sizes of SMAC's maps, beside PyMARL3's learner where a checkout of it is given.

    python benchmarks/qmix_update.py [--map 3m|5m_vs_6m|27m_vs_30m|all] [--precision float32|bf16]
        [--peer PATH_OF_A_PYMARL3_CHECKOUT] [--updates 20] [--batch 128]

Both learners get the same random episodes of ragged length (43 % of a padded batch is real), ready as each keeps them
once sampled, several batches in turn. Each works in a process of its own, set up as its own runs are; they take turns.
Times are CPU seconds of one thread, the ratio is the median of all rounds. Prints one JSON line for each map; without a
checkout it tells the stored ratio.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import json
import multiprocessing
import resource
import statistics
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from omagd.config.env_info import EntityLayout, EnvInfo
from omagd.config.loading import resolve
from omagd.controllers.n_mac import NMAC
from omagd.learners.nq_learner import NQLearner
from omagd.utils.allocator import keep_freed_memory
from omagd.utils.dist_utils import Dist
from omagd.utils.packing import pack_episodes

Episodes = list[dict[str, Tensor]]
N_BATCHES = 4


def info_of(name: str, n: int, m: int, state_dim: int, limit: int) -> EnvInfo:
    """Return a map of n against m marines as SMAC describes it."""
    layout = EntityLayout(move_dim=4, n_enemies=m, enemy_dim=5, n_allies=n - 1, ally_dim=5, own_dim=1)
    return EnvInfo("skirmish", name, n, 6 + m, layout.obs_dim, state_dim, limit, n_normal_actions=6, layout=layout)


MAPS = {
    "3m": info_of("3m", 3, 3, 48, 60),
    "5m_vs_6m": info_of("5m_vs_6m", 5, 6, 98, 70),
    "27m_vs_30m": info_of("27m_vs_30m", 27, 30, 1170, 180),
}
INFO = MAPS["5m_vs_6m"]


def make_episodes(n_episodes: int, rng: np.random.Generator, info: EnvInfo = INFO) -> Episodes:
    """Return random episodes of 10 steps up to the limit: most are short and some reach the limit, as in play."""
    episodes = []
    scale = 0.0743 * info.episode_limit
    for steps in np.clip(rng.gamma(6.0, scale, n_episodes).astype(int), 10, info.episode_limit):
        rows, n = int(steps) + 1, info.n_agents
        available = rng.random((rows, n, info.n_actions)) < 0.6
        actions = rng.integers(info.n_actions, size=(rows, n))
        np.put_along_axis(available, actions[..., None], True, axis=-1)
        terminated = np.zeros(rows, np.uint8)
        terminated[-2] = 1
        arrays = {
            "obs": rng.standard_normal((rows, n, info.obs_dim), np.float32),
            "state": rng.standard_normal((rows, info.state_dim), np.float32),
            "avail_actions": available.astype(np.uint8),
            "actions": actions.astype(np.uint8),
            "reward": rng.standard_normal(rows, np.float32),
            "terminated": terminated,
        }
        episodes.append({name: torch.from_numpy(value) for name, value in arrays.items()})
    return episodes


def ours(batches: list[Episodes], info: EnvInfo = INFO, **updates: Any) -> Callable[[int], object]:
    """Return a function that does one update of packed batch number i."""
    config = resolve("qmix", "skirmish", {"env_args.map_name": info.map_name, **updates})
    mac = NMAC(config, info, torch.device("cpu"))
    learner = NQLearner(mac, config, info, Dist())
    learner.warm_up()
    packed = [pack_episodes(episodes) for episodes in batches]
    return lambda i: learner.update(packed[i], episodes=0)


def peers(path: Path, batches: list[Episodes], info: EnvInfo = INFO) -> Callable[[int], object]:
    """Return a function that does one update of PyMARL3's learner on the same episodes, padded as it keeps them."""
    sys.path.insert(0, str(path / "src"))
    PeerMAC = importlib.import_module("controllers.n_controller").NMAC
    PeerLearner = importlib.import_module("learners.nq_learner").NQLearner

    padded = [_padded(episodes, info) for episodes in batches]
    args, groups = make_args(info), {"agents": info.n_agents}
    with contextlib.redirect_stdout(io.StringIO()):
        learner = PeerLearner(PeerMAC(padded[0].scheme, groups, args), padded[0].scheme, SimpleNamespace(), args)
    learner.log_stats_t = 0

    def update(i: int) -> None:
        with contextlib.redirect_stdout(io.StringIO()):
            learner.train(padded[i], 0, 0)

    return update


def make_args(info: EnvInfo) -> SimpleNamespace:
    """Return the peer's arguments, its own values where they are not sizes."""
    return SimpleNamespace(
        agent="n_rnn", mixer="qmix", n_agents=info.n_agents, n_actions=info.n_actions, rnn_hidden_dim=64,
        mixing_embed_dim=32, hypernet_embed=64, state_shape=info.state_dim, obs_agent_id=True, obs_last_action=True,
        agent_output_type="q", action_selector="epsilon_greedy", epsilon_start=1.0, epsilon_finish=0.05,
        epsilon_anneal_time=100000, use_cuda=False, optimizer="adam", lr=0.001, gamma=0.99, td_lambda=0.6,
        grad_norm_clip=10, use_per=False, q_lambda=False, target_update_interval=200, learner_log_interval=10**9,
        double_q=True, use_layer_norm=False, use_orthogonal=False, test_noise=False,
    )  # fmt: skip


def _padded(episodes: Episodes, info: EnvInfo) -> Any:
    """Return the peer's batch of some episodes, cut to the longest one as it does after sampling."""
    EpisodeBatch = importlib.import_module("components.episode_buffer").EpisodeBatch
    OneHot = importlib.import_module("components.transforms").OneHot
    scheme = {
        "state": {"vshape": info.state_dim},
        "obs": {"vshape": info.obs_dim, "group": "agents"},
        "actions": {"vshape": (1,), "group": "agents", "dtype": torch.long},
        "avail_actions": {"vshape": (info.n_actions,), "group": "agents", "dtype": torch.int},
        "reward": {"vshape": (1,)},
        "terminated": {"vshape": (1,), "dtype": torch.uint8},
    }
    onehot = {"actions": ("actions_onehot", [OneHot(out_dim=info.n_actions)])}
    batch = EpisodeBatch(scheme, {"agents": info.n_agents}, len(episodes), info.episode_limit + 1, preprocess=onehot)
    for i, episode in enumerate(episodes):
        fields = {name: value.numpy()[None] for name, value in episode.items()}
        fields["actions"] = fields["actions"][..., None].astype(np.int64)
        batch.update(fields, bs=slice(i, i + 1), ts=slice(0, len(episode["reward"])))
    return batch[:, : max(len(episode["reward"]) for episode in episodes)]


def work(pipe: Connection, options: argparse.Namespace, info: EnvInfo, peer: bool) -> None:
    """Do an update for every number that comes and answer with its CPU seconds; None ends: answer the peak in GB."""
    torch.set_num_threads(1)
    rng = np.random.default_rng(0)
    batches = [make_episodes(options.batch, rng, info) for _ in range(N_BATCHES)]
    if peer:
        update = peers(options.peer, batches, info)
    else:
        keep_freed_memory()
        update = ours(batches, info, precision=options.precision)
    while (number := pipe.recv()) is not None:
        start = time.process_time()
        update(number % N_BATCHES)
        pipe.send(time.process_time() - start)
    pipe.send(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20)


def measure(options: argparse.Namespace, info: EnvInfo) -> dict[str, float]:
    """Return medians, peaks of memory and the ratio."""
    spawn = multiprocessing.get_context("spawn")
    pipes = {}
    for name in ["ours", "peer"] if options.peer else ["ours"]:
        pipes[name], far = spawn.Pipe()
        spawn.Process(target=work, args=(far, options, info, name == "peer"), daemon=True).start()
    times: dict[str, list[float]] = {name: [] for name in pipes}
    for number in range(-N_BATCHES, options.updates):
        for name, pipe in pipes.items():
            pipe.send(number + N_BATCHES)
            seconds = pipe.recv()
            if number >= 0:
                times[name].append(seconds)
    result = {name: round(statistics.median(seconds), 4) for name, seconds in times.items()}
    for name, pipe in pipes.items():
        pipe.send(None)
        result[f"{name}_peak_gb"] = round(pipe.recv(), 2)
    if options.peer:
        result["ratio"] = round(statistics.median(b / a for a, b in zip(times["ours"], times["peer"], strict=True)), 2)
    return result


def main() -> None:
    """Time and print."""
    parser = argparse.ArgumentParser(description="Time one QMIX update.")
    parser.add_argument("--map", choices=[*MAPS, "all"], default="5m_vs_6m")
    parser.add_argument("--precision", choices=["float32", "bf16"], default="float32")
    parser.add_argument("--peer", type=Path, help="a checkout of PyMARL3")
    parser.add_argument("--updates", type=int, default=20)
    parser.add_argument("--batch", type=int, default=128)
    options = parser.parse_args()
    for name in MAPS if options.map == "all" else [options.map]:
        row = {"work": f"qmix_update {name}", "precision": options.precision, "batch": options.batch}
        sys.stdout.write(json.dumps({**row, **measure(options, MAPS[name])}) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
