"""Greedy episodes of a trained team: the tests of a run, and recordings for `watch` and for reports."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import torch

from omagd.config.env_info import EnvInfo
from omagd.config.schema import Config
from omagd.controllers.types import MAC
from omagd.envs.factory import make_env
from omagd.run.checkpoint.weights import find_step_folder
from omagd.run.recording.recorder import Recorder
from omagd.run.recording.recording import Recording
from omagd.run.training.build import build_mac, load_agent, load_pretrained, of_checkpoint
from omagd.run.training.session import Session
from omagd.run.training.tasks import episode_starts
from omagd.runners.runner import Runner
from omagd.runners.starts import TaskStarts
from omagd.utils.metrics import Metrics


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
        mac = load_mac(config, info, device, folder, "checkpoint_path")
        recorder = Recorder(mac, env, info, policy_name(config, folder), most=episodes)
        runner = Runner(env, config, info, episode_starts(config, info, "test", 0))
        for _ in each_map(runner, info):
            played = runner.run(recorder, explore=None, episodes_per_slot=episodes, keep=False)
            recorder.take(played.log)
        return Recording(episodes=recorder.episodes)
    finally:
        env.close()


def load_mac(config: Config, info: EnvInfo, device: torch.device, step_folder: Path, key: str) -> MAC:
    """Return the controller with the weights of a step's folder, and with the modules of stages 1 and 2 beside them.

    key: configuration key that named the folder. Errors: UserError for weights that are missing or do not fit.
    """
    mac = build_mac(config, info, device, load_pretrained(of_checkpoint(config, step_folder), info, device))
    load_agent(mac, step_folder, key)
    return mac


def each_map(runner: Runner, info: EnvInfo) -> Iterator[None]:
    """Yield once for each map of a set, while the runner's episodes start on that map alone; once for a single map."""
    for task in range(max(1, len(info.tasks))):
        if isinstance(runner.stream, TaskStarts):
            runner.stream.set_weights(np.arange(len(info.tasks)) == task)
        yield


def policy_name(config: Config, step_folder: Path) -> str:
    """Return the name of a trained policy for titles: configuration, seed and step."""
    steps = f" after {int(step_folder.name):,} steps" if step_folder.name.isdecimal() else ""
    return f"{config.name}, seed {config.seed}{steps}"


def greedy_episodes(
    session: Session, mac: MAC, wanted: int, log_at: int | None = None, recorder: Recorder | None = None
) -> dict[str, float]:
    """Play at least `wanted` greedy episodes, equally many in each slot of all ranks; return `test_*` means.

    Of a task set: so many on each map. `test/<map>/*` are means of one map; `test_*` are means over the maps that are
    trained on, `test_held_out_*` over the others.
    log_at: `t_env` with which episodes are written to `episodes/`; None to write none. recorder: of `mac`, plays in its
    place and keeps the episodes of the first slot.
    """
    runner, info, metrics = session.runners["test"], session.info, Metrics()
    for _ in each_map(runner, info):
        rollout = runner.run(
            recorder or mac,
            explore=None,
            episodes_per_slot=session.rounds(wanted),
            full_obs=mac.wants_full_obs,
            keep=False,
        )
        if recorder is not None:
            recorder.take(rollout.log)
        if log_at is not None:  # before the sum: after it rank 0 reads the lines of all ranks
            session.episode_log.write(rollout.log, t_env=log_at)
        metrics.add(means(rollout.stats, "test"), prefix="" if info.tasks else "test_")
    values = metrics.reduce(session.dist)
    return values if not info.tasks else {**values, **_means_over_maps(values, info)}


def _means_over_maps(values: Mapping[str, float], info: EnvInfo) -> dict[str, float]:
    """Return means of `test/<map>/<name>` over the maps that are trained on (`test_*`), and over the others."""
    sets = {"test": info.tasks[: info.n_training], "test_held_out": info.tasks[info.n_training :]}
    names = dict.fromkeys(name.split("/")[-1] for name in values)
    return {
        f"{prefix}_{name}": float(np.mean([values[f"test/{task}/{name}"] for task in tasks]))
        for prefix, tasks in sets.items()
        for name in names
        if tasks and all(f"test/{task}/{name}" in values for task in tasks)
    }


def means(stats: dict[str, tuple[float, float]], purpose: str = "train") -> dict[str, tuple[float, float]]:
    """Return rollout stats by PyMARL's names: return_mean, ep_length_mean, battle_won_mean, ...

    Those of one map of a set are called `<purpose>/<map>/return_mean`, ...; tests of a set have no others.
    """
    of_maps = {f"{purpose}/{name}_mean": pair for name, pair in stats.items() if "/" in name}
    whole = {f"{name}_mean": pair for name, pair in stats.items() if "/" not in name}
    return of_maps if of_maps and purpose == "test" else {**whole, **of_maps}
