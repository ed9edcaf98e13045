"""PyMARL3's own controller, mixer, learner and replay, trained on this repository's skirmish battles.

A checkout of PyMARL3 is imported as it is, with the arguments of its `default.yaml` and `algs/qmix.yaml`. What stands
in for its runner follows its order: battles in parallel, one episode each, a tick at a time; then one update; then a
test where one is due. The battles are those of a run of ours with the same seed, training and test alike.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import yaml

from omagd.config.env_info import EnvInfo
from omagd.envs.factory import make_env
from omagd.envs.protocol import BatchedEnv, Observation
from omagd.run.reporting.metrics import Every
from omagd.utils.seeding import EpisodeSeeds, seed_everything

TEST_SLOTS = 128


class Silent:
    """The logger that PyMARL3's learner asks for; keeps the last value of every name."""

    def __init__(self) -> None:
        self.values: dict[str, float] = {}
        self.console_logger = SimpleNamespace(info=lambda *_: None)

    def log_stat(self, name: str, value: Any, t: int) -> None:
        """Keep a value."""
        self.values[name] = float(value)


class Peer:
    """PyMARL3's parts for one map.

    Args:
        path: the checkout. info: the environment. floats: type of observations, rewards and weights.
        changes: laid over the checkout's own arguments.
    """

    def __init__(self, path: Path, info: EnvInfo, floats: torch.dtype = torch.float32, **changes: Any) -> None:
        sys.path.insert(0, str(path / "src"))
        self.info = info
        self.args = _arguments(path, info, changes)
        self.groups = {"agents": info.n_agents}
        self.scheme = scheme(info, floats)
        one_hot = importlib.import_module("components.transforms").OneHot(out_dim=info.n_actions)
        self.preprocess = {"actions": ("actions_onehot", [one_hot])}
        self._episodes = importlib.import_module("components.episode_buffer")
        self.logger = Silent()
        with contextlib.redirect_stdout(io.StringIO()):
            self.buffer = self._episodes.ReplayBuffer(
                self.scheme, self.groups, self.args.buffer_size, info.episode_limit + 1, preprocess=self.preprocess
            )
            controllers = importlib.import_module("controllers").REGISTRY
            learners = importlib.import_module("learners").REGISTRY
            self.mac = controllers[self.args.mac](self.buffer.scheme, self.groups, self.args)
            self.mac.agent.to(floats)
            self.learner = learners[self.args.learner](self.mac, self.buffer.scheme, self.logger, self.args)
        for mixer in (self.learner.mixer, self.learner.target_mixer):
            mixer.to(floats)

    def blank(self, n_episodes: int) -> Any:
        """Return an empty batch of episodes."""
        rows = self.info.episode_limit + 1
        return self._episodes.EpisodeBatch(self.scheme, self.groups, n_episodes, rows, preprocess=self.preprocess)

    def train(self, t_env: int, episodes: int) -> None:
        """Sample a batch, cut it to its longest episode and take one step, as PyMARL3's run does."""
        sample = self.buffer.sample(self.args.batch_size)
        sample = sample[:, : sample.max_t_filled()]
        with contextlib.redirect_stdout(io.StringIO()):  # it prints a line for each update
            self.learner.train(sample, t_env, episodes)


def _arguments(path: Path, info: EnvInfo, changes: dict[str, Any]) -> SimpleNamespace:
    """Return the checkout's arguments for QMIX, with the sizes of the environment filled in."""
    values: dict[str, Any] = {}
    for name in ("default.yaml", "algs/qmix.yaml"):
        values |= yaml.safe_load((path / "src" / "config" / name).read_text(encoding="utf-8"))
    sizes = {"n_agents": info.n_agents, "n_actions": info.n_actions}
    sizes |= {"state_shape": info.state_dim, "obs_shape": info.obs_dim, "episode_limit": info.episode_limit}
    return SimpleNamespace(**{**values, "use_cuda": False, "device": "cpu", **sizes, **changes})


def scheme(info: EnvInfo, floats: torch.dtype) -> dict[str, dict[str, Any]]:
    """Return the fields of PyMARL3's replay."""
    return {
        "state": {"vshape": info.state_dim, "dtype": floats},
        "obs": {"vshape": info.obs_dim, "group": "agents", "dtype": floats},
        "actions": {"vshape": (1,), "group": "agents", "dtype": torch.long},
        "avail_actions": {"vshape": (info.n_actions,), "group": "agents", "dtype": torch.int},
        "reward": {"vshape": (1,), "dtype": floats},
        "terminated": {"vshape": (1,), "dtype": torch.uint8},
    }


def _rows(seen: Observation, slots: np.ndarray) -> dict[str, np.ndarray]:
    """Return what the `slots` show, as PyMARL3's batch takes it: one more axis for the time step."""
    fields = {"state": seen.state, "obs": seen.obs, "avail_actions": seen.avail_actions.astype(np.int32)}
    return {name: value[slots][:, None] for name, value in fields.items()}


def play_round(peer: Peer, env: BatchedEnv, seeds: np.ndarray, t_env: int, *, test: bool) -> tuple[Any, int, float]:
    """Play one episode in every slot from `seeds` [B]; return the batch, the steps and the share of battles won."""
    batch, everyone = peer.blank(env.n_slots), np.ones(env.n_slots, bool)
    env.reset(everyone, seeds)
    slots, active = np.arange(env.n_slots), everyone.copy()
    batch.update(_rows(env.observe(), slots), ts=0, mark_filled=True)
    peer.mac.init_hidden(batch_size=env.n_slots)
    steps, won = 0, 0.0
    for t in range(env.info.episode_limit):
        rows = slots.tolist()
        chosen = peer.mac.select_actions(batch, t_ep=t, t_env=t_env, bs=rows, test_mode=test).numpy()
        batch.update({"actions": chosen[:, None]}, bs=rows, ts=t, mark_filled=False)
        actions = np.zeros((env.n_slots, env.info.n_agents), np.int64)
        actions[slots] = chosen
        result = env.step(actions, active)
        steps += len(slots)
        ended = result.terminated & active
        won += float(result.info["battle_won"][ended].sum()) if ended.any() else 0.0
        terminal = (result.terminated & ~result.truncated)[slots]
        after = {"reward": result.reward[slots][:, None], "terminated": terminal[:, None, None]}
        batch.update(after, bs=rows, ts=t, mark_filled=False)
        batch.update(_rows(env.observe(), slots), bs=rows, ts=t + 1, mark_filled=True)
        active &= ~ended
        slots = np.flatnonzero(active)
        if not len(slots):
            break
    return batch, steps, won / env.n_slots


def train(
    path: Path, map_name: str, seed: int, t_max: int, test_interval: int, episodes: int, **changes: Any
) -> dict[str, Any]:
    """Train with one seed; return the tests (t_env, seconds, win rate) and what was done."""
    torch.set_num_threads(1)
    probe = make_env("skirmish", {"map_name": map_name}, 1, processes=False)
    seed_everything(seed, "pymarl3")
    peer = Peer(path, probe.info, **changes)
    n_slots = peer.args.batch_size_run
    env = make_env("skirmish", {"map_name": map_name}, n_slots, processes=False)
    test_env = make_env("skirmish", {"map_name": map_name}, min(TEST_SLOTS, episodes), processes=False)
    train_seeds, tested = EpisodeSeeds(seed, "train"), TestBattles(seed, n_slots, episodes)
    due, started = Every(test_interval, first=True), time.monotonic()
    t_env, played, updates, tests = 0, 0, 0, []
    with torch.no_grad():
        while t_env < t_max:
            batch, steps, _ = play_round(peer, env, train_seeds.draw(np.ones(n_slots, bool)), t_env, test=False)
            peer.buffer.insert_episode_batch(batch)
            t_env, played = t_env + steps, played + n_slots
            if peer.buffer.can_sample(peer.args.batch_size):
                with torch.enable_grad():
                    peer.train(t_env, played)
                updates += 1
            if due.due(t_env) or t_env >= t_max:
                won = tested.play(peer, test_env, t_env)
                tests.append([t_env, round(time.monotonic() - started), round(won, 4)])
    return {"tests": tests, "updates": updates, "episodes": played, "seconds": round(time.monotonic() - started)}


class TestBattles:
    """The test battles of a run of ours with the same seed, one set after another.

    Args:
        seed: of the run. n_slots: its battles side by side. episodes: of each test, a multiple of `n_slots`.
    """

    def __init__(self, seed: int, n_slots: int, episodes: int) -> None:
        self.stream, self.everyone = EpisodeSeeds(seed, "test"), np.ones(n_slots, bool)
        self.draws = episodes // n_slots

    def play(self, peer: Peer, env: BatchedEnv, t_env: int) -> float:
        """Play the next set greedily; return the share won."""
        seeds = np.concatenate([self.stream.draw(self.everyone) for _ in range(self.draws)])
        rates = [play_round(peer, env, part, t_env, test=True)[2] for part in seeds.reshape(-1, env.n_slots)]
        return float(np.mean(rates))
