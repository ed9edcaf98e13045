"""CPU milliseconds of one DDPG update on single steps, one thread: minimum and median.

OMP_NUM_THREADS=1 python benchmarks/ddpg_speed.py --batch 64 --updates 100
"""

from __future__ import annotations

import argparse
import statistics
import time

import numpy as np
import torch

from omagd.config.env_info import EnvInfo
from omagd.config.loading import resolve
from omagd.controllers import REGISTRY as MACS
from omagd.learners import REGISTRY as LEARNERS
from omagd.learners.ddpg_learner import DDPGLearner
from omagd.run.training.device import keep_freed_memory
from omagd.utils.dist_utils import Dist
from omagd.utils.packing import Episode, pack_episodes

KINDS: dict[str, dict[str, object]] = {
    "ddpg": {},
    "gumbel_softmax=True": {"gumbel_softmax": True},
    "precision=bf16": {"precision": "bf16"},
    "agent=bicnet": {"agent": "bicnet"},
}


def random_steps(info: EnvInfo, count: int) -> list[Episode]:
    """Return `count` steps of chance, as `runner=ticks` hands them on."""
    rng, n = np.random.default_rng(0), info.n_agents
    arrays = {
        "obs": rng.standard_normal((count, 2, n, info.obs_dim), np.float32),
        "actions": rng.integers(info.n_actions, size=(count, 2, n)).astype(np.uint8),
        "reward": rng.standard_normal((count, 2), np.float32),
        "agent_reward": rng.standard_normal((count, 2, n), np.float32),
        "terminated": np.zeros((count, 2), np.uint8),
        "action_probs": rng.random((count, 2, n, info.n_actions), np.float32),
    }
    return [{name: torch.from_numpy(value[i]) for name, value in arrays.items()} for i in range(count)]


def make_learner(info: EnvInfo, hidden: int, updates: dict[str, object]) -> DDPGLearner:
    """Return a learner of the preset snakes_ddpg, warm."""
    config = resolve("snakes_ddpg", "snakes", {"rnn_hidden_dim": hidden, **updates})
    mac = MACS.get(config.mac)(config, info, torch.device("cpu"), None)
    learner: DDPGLearner = LEARNERS.get(config.learner)(mac, config, info, Dist())
    learner.warm_up()
    return learner


def main() -> None:
    """Print one line for each kind."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--obs", type=int, default=26, help="features of an agent")
    parser.add_argument("--updates", type=int, default=100)
    args = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()  # as every run does
    info = EnvInfo("snakes_3v3", "", 3, 4, args.obs, 66, 200, 4, agent_rewards=True)
    batch = pack_episodes(random_steps(info, args.batch))
    for kind, updates in KINDS.items():
        learner = make_learner(info, args.hidden, updates)
        times = []
        for _ in range(args.updates):
            start = time.process_time()
            learner.update(batch, episodes=0)
            times.append(1000 * (time.process_time() - start))
        print(f"{kind:20} minimum {min(times):6.2f} ms, median {statistics.median(times):6.2f} ms", flush=True)


if __name__ == "__main__":
    main()
