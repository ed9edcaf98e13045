"""Time one QMIX update at the sizes of 5m_vs_6m, beside PyMARL3's learner where a checkout of it is given.

    python benchmarks/qmix_update.py [--peer PATH_OF_A_PYMARL3_CHECKOUT] [--updates 20] [--batch 128]

Both learners get the same random episodes of ragged length (mean about 31 of at most 70), ready as each keeps a sampled
batch, and take turns; times are CPU seconds of this process on one thread, the ratio is the median of all rounds.
Prints one JSON line.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from torch import Tensor

from omagd.config.env_info import EntityLayout, EnvInfo
from omagd.config.loading import resolve
from omagd.controllers.n_mac import NMAC
from omagd.learners.nq_learner import NQLearner
from omagd.utils.dist_utils import Dist
from omagd.utils.packing import pack_episodes

LAYOUT = EntityLayout(move_dim=4, n_enemies=6, enemy_dim=5, n_allies=4, ally_dim=5, own_dim=1)
INFO = EnvInfo("skirmish", "5m_vs_6m", 5, 12, 55, 98, 70, n_normal_actions=6, layout=LAYOUT)


def make_episodes(n_episodes: int, rng: np.random.Generator) -> list[dict[str, Tensor]]:
    """Return random episodes of 10 to 70 steps: most are short and some reach the limit, as in play."""
    episodes = []
    for steps in np.clip(rng.gamma(6.0, 5.2, n_episodes).astype(int), 10, INFO.episode_limit):
        rows, n = int(steps) + 1, INFO.n_agents
        available = rng.random((rows, n, INFO.n_actions)) < 0.6
        actions = rng.integers(INFO.n_actions, size=(rows, n))
        np.put_along_axis(available, actions[..., None], True, axis=-1)
        terminated = np.zeros(rows, np.uint8)
        terminated[-2] = 1
        arrays = {
            "obs": rng.normal(size=(rows, n, INFO.obs_dim)).astype(np.float32),
            "state": rng.normal(size=(rows, INFO.state_dim)).astype(np.float32),
            "avail_actions": available.astype(np.uint8),
            "actions": actions.astype(np.uint8),
            "reward": rng.normal(size=rows).astype(np.float32),
            "terminated": terminated,
        }
        episodes.append({name: torch.from_numpy(value) for name, value in arrays.items()})
    return episodes


def ours(episodes: list[dict[str, Tensor]], agent: str = "n_rnn") -> Callable[[], object]:
    """Return a function that does one update of a packed batch."""
    config = resolve("qmix", "skirmish", {"env_args.map_name": "5m_vs_6m", "agent": agent})
    mac = NMAC(config, INFO, torch.device("cpu"))
    learner = NQLearner(mac, config, INFO, Dist())
    learner.warm_up()
    batch = pack_episodes(episodes)
    return lambda: learner.update(batch, episodes=0)


def peers(path: Path, episodes: list[dict[str, Tensor]]) -> Callable[[], object]:
    """Return a function that does one update of PyMARL3's learner on the same episodes, padded as it keeps them."""
    sys.path.insert(0, str(path / "src"))
    EpisodeBatch = importlib.import_module("components.episode_buffer").EpisodeBatch
    OneHot = importlib.import_module("components.transforms").OneHot
    PeerMAC = importlib.import_module("controllers.n_controller").NMAC
    PeerLearner = importlib.import_module("learners.nq_learner").NQLearner

    args = SimpleNamespace(
        agent="n_rnn", mixer="qmix", n_agents=5, n_actions=12, rnn_hidden_dim=64, mixing_embed_dim=32,
        hypernet_embed=64, state_shape=98, obs_agent_id=True, obs_last_action=True, agent_output_type="q",
        action_selector="epsilon_greedy", epsilon_start=1.0, epsilon_finish=0.05, epsilon_anneal_time=100000,
        use_cuda=False, optimizer="adam", lr=0.001, gamma=0.99, td_lambda=0.6, grad_norm_clip=10, use_per=False,
        q_lambda=False, target_update_interval=200, learner_log_interval=10**9, double_q=True, use_layer_norm=False,
        use_orthogonal=False, test_noise=False,
    )  # fmt: skip
    scheme = {
        "state": {"vshape": 98},
        "obs": {"vshape": 55, "group": "agents"},
        "actions": {"vshape": (1,), "group": "agents", "dtype": torch.long},
        "avail_actions": {"vshape": (12,), "group": "agents", "dtype": torch.int},
        "reward": {"vshape": (1,)},
        "terminated": {"vshape": (1,), "dtype": torch.uint8},
    }
    onehot = {"actions": ("actions_onehot", [OneHot(out_dim=12)])}
    batch = EpisodeBatch(scheme, {"agents": 5}, len(episodes), INFO.episode_limit + 1, preprocess=onehot)
    for i, episode in enumerate(episodes):
        fields = {name: value.numpy()[None] for name, value in episode.items()}
        fields["actions"] = fields["actions"][..., None].astype(np.int64)
        batch.update(fields, bs=slice(i, i + 1), ts=slice(0, len(episode["reward"])))
    longest = max(len(episode["reward"]) for episode in episodes)
    with contextlib.redirect_stdout(io.StringIO()):
        learner = PeerLearner(PeerMAC(batch.scheme, {"agents": 5}, args), batch.scheme, SimpleNamespace(), args)
    learner.log_stats_t = 0
    trimmed = batch[:, :longest]

    def update() -> None:
        with contextlib.redirect_stdout(io.StringIO()):
            learner.train(trimmed, 0, 0)

    return update


def cpu_seconds(work: Callable[[], object]) -> float:
    """Return the CPU seconds that one call takes."""
    start = time.process_time()
    work()
    return time.process_time() - start


def main() -> None:
    """Time and print."""
    parser = argparse.ArgumentParser(description="Time one QMIX update.")
    parser.add_argument("--peer", type=Path, help="a checkout of PyMARL3")
    parser.add_argument("--updates", type=int, default=20)
    parser.add_argument("--batch", type=int, default=128)
    options = parser.parse_args()
    torch.set_num_threads(1)
    episodes = make_episodes(options.batch, np.random.default_rng(0))
    works = {"ours": ours(episodes)}
    if options.peer:
        works["peer"] = peers(options.peer, episodes)
    times: dict[str, list[float]] = {name: [] for name in works}
    for work in works.values():
        cpu_seconds(work)
    for _ in range(options.updates):
        for name, work in works.items():
            times[name].append(cpu_seconds(work))
    rows = [len(episode["reward"]) for episode in episodes]
    result: dict[str, float] = {"real_share": round(sum(rows) / (max(rows) * len(rows)), 2)}
    result |= {name: round(statistics.median(seconds), 4) for name, seconds in times.items()}
    if options.peer:
        result["ratio"] = round(statistics.median(b / a for a, b in zip(times["ours"], times["peer"], strict=True)), 2)
    sys.stdout.write(json.dumps({"work": "qmix_update 5m_vs_6m", "batch": options.batch, **result}) + "\n")


if __name__ == "__main__":
    main()
