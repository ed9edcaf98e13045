"""Episodes of a trained team: tests in training, and `evaluate`."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from omagd.config.env_info import EnvInfo
from omagd.config.loading import apply_texts, read_saved, validate
from omagd.config.schema import Config
from omagd.controllers.types import MAC, Exploration
from omagd.envs import REGISTRY as ENVS
from omagd.run.checkpoint.store import NO_AGENT, StageResult
from omagd.run.checkpoint.weights import find_step_folder, run_folder_of
from omagd.run.recording.recorder import Recorder
from omagd.run.recording.recording import Recording, save_recording
from omagd.run.reporting.card import Card, read_card
from omagd.run.reporting.metrics import Metrics
from omagd.run.run_folder import RunFolder
from omagd.run.training.build import build_mac, load_agent, load_pretrained, of_checkpoint
from omagd.run.training.stages.base import Session, require_same_weights
from omagd.runners.runner import Runner, TaskStarts
from omagd.utils.errors import Mistakes, UserError, collected
from omagd.utils.seeding import generator
from omagd.utils.storage import STORAGE


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


def play_tests(
    session: Session, mac: MAC, wanted: int,
    log: Callable[[Sequence[Mapping[str, Any]]], object] | None = None, recorder: Recorder | None = None,
) -> dict[str, float]:  # fmt: skip
    """Play at least `wanted` episodes, equally many in each slot of all ranks; return `test_*` means.

    Of a task set: so many on each map. `test/<map>/*` are means of one map; `test_*` are means over the maps that are
    trained on, `test_held_out_*` over the others.
    log: gets this rank's episodes. recorder: plays in place of `mac` and keeps the episodes of the first slot.
    """
    runner, info, metrics, config = session.runners["test"], session.info, Metrics(), session.config
    each = session.rounds(wanted)
    # Without `test_greedy` a policy draws, with the same numbers in each test, and nobody explores.
    drawn = None if config.test_greedy else Exploration(0.0, generator(config.seed, "tests", session.dist.rank))
    for _ in each_map(runner, info):
        rollout = runner.run(
            recorder or mac, explore=drawn, episodes_per_slot=each, full_obs=mac.wants_full_obs, keep=False
        )
        if recorder is not None:
            recorder.take(rollout.log)
        if log is not None:
            log(rollout.log)  # before the sum: after it rank 0 reads the lines of all ranks
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


def means(stats: dict[str, tuple[float, float]], purpose: str = "train") -> dict[str, tuple[float, float | str]]:
    """Return rollout stats by PyMARL's names: return_mean, ep_length_mean, battle_won_mean, ...

    Those of one map of a set are called `<purpose>/<map>/return_mean`, ...; tests of a set have no others.
    """
    maps = {name.removesuffix("/ep_length") for name in stats if name.endswith("/ep_length")}
    found = dict[str, tuple[float, float | str]]()
    for name, (total, count) in stats.items():
        place = name.rpartition("/")[0]
        of_map = place in maps
        if of_map or not maps or purpose != "test":
            label = f"{purpose}/{name}_mean" if of_map else f"{name}_mean"
            # An episode that does not report a result counts as 0, as in PyMARL: the mean is over all episodes.
            lengths = f"{purpose}/{place}/ep_length_mean" if of_map else "ep_length_mean"
            found[label] = (total, count if label == lengths else lengths)
    return found


BEST_OF = ("test_battle_won_mean", "test_return_mean")
"""Metrics whose best values are kept. The first one that an environment has is the score of the run."""

KEPT = ("task", "length", "return", "battle_won")
"""What is kept of the episodes of the absolute metric, where an environment reports it."""


def _copied(module: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().cpu().clone() for name, value in module.state_dict().items()}


class Tests:
    """Plays tests and keeps what they gave.

    Attributes:
        last: step and metrics of the last test. best: the best values so far. best_agent: step, weights and values of
            the best test, for `absolute_episodes`; of equal win rates, that with the higher return. played, improved:
            whether there was a test in this iteration, and whether its score was the best so far.
    """

    def __init__(self, session: Session, mac: MAC) -> None:
        self.session, self.mac = session, mac
        self.last: tuple[int, dict[str, float]] = (-1, {})
        self.best: dict[str, float] = {}
        self.best_agent = NO_AGENT
        self.played = self.improved = False
        self._video: Recording | None = None  # of a test, to be shown with its log

    def begin(self) -> None:
        """Begin an iteration."""
        self.played = self.improved = False

    def play(self, t_env: int, when: str, ends: bool) -> None:
        """Play this rank's share of the test episodes.

        when: stage and time, for titles. ends: whether training is over, so that the test is recorded in any case.
        """
        session, recorder = self.session, None
        if session.config.log_video and session.dist.is_main:
            recorder = Recorder(self.mac, session.env, session.info, f"{session.config.name}, {when}", most=1)
        values = play_tests(session, self.mac, session.config.test_nepisode, recorder=recorder)
        values = {**dict.fromkeys(self.last[1], 0.0), **values}  # a result that none of these episodes reports is 0
        before = next((self.best.get(f"best_{name}", -math.inf) for name in BEST_OF if name in values), math.inf)
        self.last, self.played = (t_env, values), True
        score = self.score()
        self.improved = score is not None and score > before
        for name in BEST_OF:
            if name in values:
                self.best[f"best_{name}"] = max(values[name], self.best.get(f"best_{name}", -math.inf))
        reached = tuple(values.get(name, 0.0) for name in BEST_OF)
        best = (0.0, *self.best_agent[2])[-2:]  # earlier versions left out a win rate that no test had
        if session.config.absolute_episodes and reached > best:
            self.best_agent = (t_env, _copied(self.mac.agent), reached)
        wanted = recorder is not None and recorder.episodes and (self.improved or ends)
        self._video = Recording(episodes=recorder.episodes) if recorder is not None and wanted else None

    def absolute(self) -> tuple[dict[str, float], dict[str, Any]]:
        """Play `absolute_episodes` episodes with the weights of the best test; return means, and the episodes by rank.

        Source: Gorsane et al. 2022, Towards a Standardised Performance Evaluation Protocol for Cooperative MARL.
        """
        session, agent, own = self.session, self.mac.agent, list[Mapping[str, Any]]()
        last, (t_env, best, _) = _copied(agent), self.best_agent
        agent.load_state_dict(best or last)  # none where scores are NaN
        values = play_tests(session, self.mac, session.config.absolute_episodes, own.extend)
        agent.load_state_dict(last)
        ranks = session.dist.gather([{name: each[name] for name in KEPT if name in each} for each in own])
        episodes = [each for rank in ranks for each in rank]
        names = [name for name in KEPT if any(name in each for each in episodes)]
        facts = {"t_env": t_env, **{name: [each.get(name, 0.0) for each in episodes] for name in names}}
        return {name.replace("test", "absolute", 1): value for name, value in values.items()}, facts

    def results(self) -> dict[str, float]:
        """Return the metrics of the last test and the best of all tests."""
        return {**self.last[1], **self.best}

    def score(self) -> float | None:
        """Return the last test's win rate, or its return where no test had a win rate."""
        return next((self.last[1][name] for name in BEST_OF if name in self.last[1]), None)

    def show(self, t_env: int) -> None:
        """Write the recorded battles of a test, if any, and send their video to the log sinks."""
        if self._video is None:
            return
        video, self._video, path = self._video, None, self.session.folder.replays / f"test_{t_env}"
        with STORAGE.attempt("replays"):
            self.session.logger.picture("test_battle", save_recording(video, path, "gif"))


FIXED = {
    "evaluate": True, "load_step": 0, "seeds": (), "unique_token": "", "auto_resume": False, "pretrain_only": False,
    "evaluation_only": False, "use_wandb": False, "use_tensorboard": False, "log_video": False,
    "profile": False,
}  # fmt: skip
"""Values that an evaluation does not take from the evaluated run's `config.json`."""

HERE = {
    "run": "default", "world_size": None, "dist_backend": None, "max_memory_per_gpu_gb": None, "precision": "float32",
    "buffer_cpu_only": None, "graph_updates": None,
}  # fmt: skip
"""Values for one process on any machine, instead of those of the training run."""


def policy_path(path: str) -> str:
    """Return a path as it is, or that of a published policy `<env>/<map>/<name>`. Errors: UserError."""
    if path.count("/") != 2 or path.partition("/")[0] not in ENVS or os.path.exists(path):
        return path
    return str(import_module("omagd.lab.published").folder_of(path))


def evaluation_config(
    run: str, texts: Mapping[str, Any], command: str = "evaluate", mistakes: Mistakes | None = None
) -> Config:
    """Return the configuration that evaluates a run: the run's own with the keys in `texts` changed.

    Args:
        run: the run's folder, its `models/`, one step's folder, or a published policy. texts: the text of each
            `key=value`. command: what the user called, for errors. mistakes: collects wrong keys and values.
    Errors: UserError for a folder that holds no run, a `config.json` that cannot be read, wrong keys and values.
    """
    source = f"{command} {run}"
    for key in ("evaluate", "checkpoint_path"):
        if key in texts:
            raise UserError(f"{key}={texts[key]}: already set by `{source}`. Leave it out")
    path = policy_path(run)
    folder = RunFolder(run_folder_of(find_step_folder(path, source=source)))
    beside = folder.evaluations if path == run else "results"
    paths = {"checkpoint_path": str(Path(path).expanduser().absolute()), "local_results_path": str(beside)}
    values: dict[str, Any] = {**read_saved(folder.config_json, source), **FIXED, **HERE, **paths}
    if "test_nepisode" in texts:  # else the run's `eval_report_episodes` would override it
        values["eval_report_episodes"] = 0
    with collected(mistakes) as found:
        return validate(apply_texts(values, texts, found), found)


def trained_card(config: Config) -> Card | None:
    """Return the card of the training that an evaluation plays; None where there is none. Errors: UserError."""
    if not config.evaluate:
        return None
    return read_card(run_folder_of(find_step_folder(config.checkpoint_path, config.load_step)))


def evaluate(session: Session) -> StageResult:
    """Play `eval_report_episodes` (else `test_nepisode`) episodes over all ranks with the saved agent."""
    config, info, device = session.config, session.info, session.dist.device
    folder = find_step_folder(config.checkpoint_path, config.load_step)
    session.logger.info(f"evaluation of {folder}")
    mac = load_mac(config, info, device, folder, "checkpoint_path")
    require_same_weights(session.dist, mac.agent, "checkpoint_path")
    t_env = int(folder.name) if folder.name.isdecimal() else 0
    records = config.save_replay and session.dist.is_main
    recorder = Recorder(mac, session.env, info, policy_name(config, folder)) if records else None
    wanted = config.eval_report_episodes or config.test_nepisode
    values = play_tests(session, mac, wanted, partial(session.episode_log.add, t_env=t_env), recorder)
    values.update(session.failure_counts())
    session.logger.log(values, stage="stage3", clock="t_env", t=t_env)
    if recorder is not None:
        with STORAGE.attempt("replays"):
            save_recording(Recording(episodes=recorder.episodes), session.folder.replays / "episodes", "html")
    if config.save_replay:
        # An environment may have replays of its own, as StarCraft II has.
        with suppress(NotImplementedError), STORAGE.attempt("replays"):
            session.env.save_replay(str(session.folder.replays))
    return StageResult("stage3", {"t_env": t_env}, values, {"agent": str(folder)})
