"""What the examples share: the number of steps of the command line, and battles of `skirmish` that run side by side."""

import random
import sys

import numpy as np
import torch

from omagd.config.loading import resolve
from omagd.controllers.scripted_mac import ScriptedPolicy
from omagd.envs.factory import make_env
from omagd.runners.runner import ParallelRunner
from omagd.utils.packing import pack_episodes
from omagd.utils.seeding import EpisodeSeeds


def begin(steps):
    """Seed, keep torch on one core, and return the steps to take: those of `--steps=N`, else the given ones."""
    random.seed(1)
    torch.manual_seed(1)
    torch.set_num_threads(1)
    return int(sys.argv[1].removeprefix("--steps=")) if sys.argv[1:] else steps


def battles(preset, purpose="train", n_slots=128, **env_args):
    """Return the preset's configuration (sizes of networks), the facts of 3m, and a runner of `n_slots` battles."""
    config = resolve(config=preset, env_config="skirmish")
    env = make_env("skirmish", {"map_name": "3m", **env_args}, n_slots, processes=False)
    return config, env.info, ParallelRunner(env, config, env.info, EpisodeSeeds(1, purpose))


def win_rate(runner, mac):
    """Return the share of greedy battles that the team wins, one in each slot."""
    won, played = runner.run(mac, explore=None, keep=False).stats["battle_won"]
    return won / played


def play(purpose, **env_args):
    """Return the facts of 3m, and 256 battles of scripted players with what agents see and what there is."""
    _, info, runner = battles("omagd_small", purpose, 256, **env_args)
    scripts = tuple(name for name in info.scripted_policies if name != "random")
    policy = ScriptedPolicy(runner.env, scripts, 0.3, np.random.default_rng(1))
    return info, pack_episodes(runner.run(policy, explore=None, full_obs=True).episodes)
