"""Plays episodes with the trained team of a run and records them, for `watch` and for reports."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from omagd.config.schema import Config
from omagd.envs.factory import make_env
from omagd.run.checkpoint.weights import find_step_folder
from omagd.run.training.build import build_mac, load_agent, load_pretrained, of_checkpoint
from omagd.run.training.tasks import episode_starts
from omagd.run.watch.recorder import Recorder
from omagd.run.watch.recording import Recording
from omagd.runners.runner import Runner
from omagd.runners.starts import TaskStarts


def record_battles(config: Config, episodes: int = 1, source: str = "checkpoint_path") -> Recording:
    """Play greedy episodes with the saved team and return their recording.

    Args:
        config: from `evaluation_config`. episodes: of each map; of a set, on all its maps. Without a seed of their own
            they are the first test episodes of the run. source: what named the run, for errors.
    Errors: UserError for weights that are missing, damaged, or of another map.
    """
    torch.set_num_threads(config.torch_threads)
    device, folder = torch.device("cpu"), find_step_folder(config.checkpoint_path, config.load_step, source=source)
    env = make_env(config.env, dict(config.env_args), 1, processes=False)
    try:
        info = env.info
        mac = build_mac(config, info, device, load_pretrained(of_checkpoint(config, folder), info, device))
        load_agent(mac, folder, source)
        recorder = Recorder(mac, env, info, policy_name(config, folder), most=episodes)
        runner = Runner(env, config, info, episode_starts(config, info, "test", 0))
        for task in range(max(1, len(info.tasks))):
            if isinstance(runner.stream, TaskStarts):
                runner.stream.set_weights(np.arange(len(info.tasks)) == task)
            played = runner.run(recorder, explore=None, episodes_per_slot=episodes, keep=False)
            recorder.take(played.log)
        return Recording(episodes=recorder.episodes)
    finally:
        env.close()


def policy_name(config: Config, step_folder: Path) -> str:
    """Return the name of a trained policy for titles: configuration, seed and step."""
    steps = f" after {int(step_folder.name):,} steps" if step_folder.name.isdecimal() else ""
    return f"{config.name}, seed {config.seed}{steps}"
