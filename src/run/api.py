"""Python interface (docs/python_api.md): `run`, `load_policy`, `make` and `play` of `omagd`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from omagd.config.env_info import EnvInfo
from omagd.config.loading import config_names, read_preset, read_saved, validate
from omagd.config.schema import Config
from omagd.controllers.types import Decision, Tick
from omagd.envs import REGISTRY as ENVS
from omagd.envs.factory import make_env
from omagd.envs.parallel import ParallelBattle
from omagd.envs.protocol import AGENT_REWARD, LOST_IN_A_ROW, Observation
from omagd.envs.task_sets import task_set
from omagd.run.checkpoint.weights import find_step_folder, run_folder_of
from omagd.run.launchers import join_tasks
from omagd.run.recording import RENDER_MODES
from omagd.run.recording.recorder import probabilities, views_of
from omagd.run.run import run as run_seeds
from omagd.run.run_folder import RunFolder
from omagd.run.training import build
from omagd.run.training.checks import require_same_map
from omagd.run.training.evaluate import load_mac, policy_path
from omagd.run.training.stages.base import PretrainedModules
from omagd.utils.errors import UserError, unknown_name
from omagd.utils.seeding import EpisodeSeeds


class Team(Protocol):
    """A policy for `play`."""

    def reset(self) -> None:
        """Forget the episode."""

    def act(self, obs: np.ndarray, mask: np.ndarray) -> np.ndarray:
        """Return actions [n] for `obs` [n, obs_dim] and available actions `mask` [n, A] bool."""


def run(config: Config) -> dict[str, Any]:
    """Run a configuration like the command line, but without Sacred, and return the summary.

    Args:
        config: from `omagd.config.loading.resolve(config="qmix", env_config="skirmish", updates={"seed": 2})`. With
            several ranks, call it under `if __name__ == "__main__":`, since they import the calling script.
    Errors: UserError for what the configuration gets wrong.
    """
    from omagd.run.cli.preflight import preflight

    join_tasks()
    return run_seeds(None, preflight(config).config)


def make(env: str, render_mode: str | None = None, **env_args: Any) -> ParallelBattle:
    """Return one battle of an environment, with PettingZoo's parallel interface. Close it after use.

    Args:
        env: what `--env-config` takes ("skirmish", "sc2_v2_terran"), with its arguments as defaults, or the plain name
            of an environment. render_mode: "rgb_array" for pictures by `render()`. env_args: arguments of the
            environment (`map_name="3m"`).
    Errors: UserError for unknown names and arguments, or where the environment cannot be built here.
    """
    name, values = env, dict(env_args)
    if env in config_names("envs"):
        file = read_preset("envs", env)
        name, values = file["env"], {**(file.get("env_args") or {}), **env_args}
    elif env not in ENVS:
        raise unknown_name("env", env, sorted({*config_names("envs"), *ENVS.names()}))
    if (tasks := task_set(values.get("map_name"))) is not None:
        raise UserError(f"env_args.map_name={values['map_name']}: make one battle of {', '.join(tasks.maps)}")
    draw = None if render_mode is None else RENDER_MODES.get(render_mode)
    return ParallelBattle(make_env(name, values, 1, processes=False), draw)


def play(policy: Team, env: ParallelBattle, episodes: int, seed: int = 1) -> dict[str, Any]:
    """Play whole episodes and return their results.

    Args:
        policy: from `load_policy`, or any object with its `reset()` and `act(obs, mask)`. env: from `make`; it is left
            open. episodes: at least 1. seed: of the episodes; a run's test episodes in its first slot, if it is the
            run's seed.
    Returns: `returns`, `lengths` and, where battles can be won, `battle_won`: a list with an entry per episode each;
        `totals`: `episodes`, `steps`, `lost_episodes` (void and played again) and the means of what the environment
        reports at an episode's end (`return_mean`, `ep_length_mean`, `battle_won_mean`, ...).
    Errors: TypeError for other objects; UserError for a policy of another map, or when ten episodes in a row are lost;
        ValueError for a closed environment.
    """
    if not all(callable(getattr(policy, name, None)) for name in ("reset", "act")):
        raise TypeError(
            f"policy={policy!r}: give what load_policy returns, or an object with reset() and act(obs, mask)"
        )
    if not isinstance(env, ParallelBattle):
        raise TypeError(f"env={env!r}: give an environment that omagd.make returns")
    if episodes < 1:
        raise UserError(f"episodes={episodes}: must be at least 1")
    if isinstance(policy, LoadedPolicy):
        policy = policy.on(env.info)
    seeds, lost, in_a_row, played = EpisodeSeeds(seed, "test"), 0, 0, list[dict[str, Any]]()
    while len(played) < episodes:
        result = _play_one(policy, env, int(seeds.draw(np.ones(1, bool))[0]))
        if result.pop("lost", False):
            lost, in_a_row = lost + 1, in_a_row + 1
            if in_a_row == LOST_IN_A_ROW:
                raise UserError(f"env={env.info.name}: {in_a_row} episodes in a row were lost; correct the environment")
        else:
            in_a_row = 0
            played.append(result)
    each = {name: [result.get(name, 0.0) for result in played] for name in dict.fromkeys(chain(*played))}
    means = {f"{name}_mean": float(np.mean(values)) for name, values in each.items()}
    found = {"returns": each["return"], "lengths": each["ep_length"]}
    if env.info.has_win:
        found["battle_won"] = [bool(result.get("battle_won")) for result in played]
    return {**found, "totals": {"episodes": episodes, "steps": sum(each["ep_length"]), "lost_episodes": lost, **means}}


def _play_one(policy: Team, env: ParallelBattle, seed: int) -> dict[str, Any]:
    """Play the episode of `seed`; return its return, its length and what the environment reports at its end."""
    seen, _ = env.reset(seed=seed)
    policy.reset()
    total, length, info = 0.0, 0, dict[str, Any]()
    while env.agents:
        own = np.stack([seen[agent]["observation"] for agent in env.agents])
        mask = np.stack([seen[agent]["action_mask"] for agent in env.agents]).astype(bool)
        if isinstance(policy, LoadedPolicy) and policy.wants_full_obs:
            actions = policy.act(own, mask, env.full_observations())
        else:
            actions = np.asarray(policy.act(own, mask))
        agents = list(env.agents)
        seen, rewards, _, _, infos = env.step(dict(zip(agents, actions.tolist(), strict=True)))
        total, length, info = total + rewards[agents[0]], length + 1, infos[agents[0]]
    info.pop(AGENT_REWARD, None)
    return {"return": total, "ep_length": length, **info}


@contextmanager
def _threads(count: int) -> Iterator[None]:
    """Let torch use `count` threads within a block."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class LoadedPolicy:
    """A trained team that acts greedily and keeps the state of an episode: call `reset` at its start.

    Attributes:
        config: of the run that trained it; acting uses its `torch_threads`. info: facts of its environment.
        agent: the network.
        values: [n, A] float32 of the last `act`: Q-values, also of unavailable actions, or the probabilities of actions
            where the team was trained with a policy gradient (`outputs_logits`). None before the first.
    """

    def __init__(self, config: Config, info: EnvInfo, mac: Any) -> None:
        self.config = config
        self.info = info
        self._mac = mac
        self.agent = mac.agent
        self.outputs_logits = bool(getattr(mac, "outputs_logits", False))
        self.reset()

    @property
    def wants_full_obs(self) -> bool:
        """Whether `act` needs observations without range limit (`use_full_obs`, `use_team_obs`)."""
        return bool(self._mac.wants_full_obs)

    def on(self, info: EnvInfo) -> LoadedPolicy:
        """Return this policy for the environment of `info`; itself where the map and the sizes are its own.

        Agents that read any number of units play other maps, too. Errors: UserError for a map that they cannot play.
        """
        require_same_map(self.info, info, "policy", self._mac.agent)
        sizes = [(facts.n_agents, facts.n_actions, facts.obs_dim) for facts in (self.info, info)]
        if sizes[0] == sizes[1]:
            return self
        if self.config.use_graph_reconstruction:  # tokenizer and predictor know the numbers of units of their map
            raise UserError(
                f"policy: reconstructs observations of {self.info.map_name}; it cannot play {info.map_name}. Give a"
                " policy without use_graph_reconstruction"
            )
        mac = build.build_mac(self.config, info, torch.device("cpu"), PretrainedModules())
        mac.agent.load_state_dict(self._mac.agent.state_dict())
        mac.head = None  # it says only what the units of its own map are like
        return LoadedPolicy(self.config, info, mac)

    def reset(self) -> None:
        """Forget the episode."""
        self._mac.begin(1)
        self._mac.reset(np.ones(1, bool))
        self._last: tuple[Tick, Decision] | None = None
        self._step = 0
        self.values: np.ndarray | None = None

    def snapshot(self) -> dict[str, Any]:
        """Return the state of the episode, to continue from it later or elsewhere.

        `step`: acts so far; `policy`: tensors, among them `hidden` [1, n, H], the recurrent state (its shape is that of
        the agent's `init_hidden(1)`), and `last_action` [1, n], -1 at the start.
        """
        return {"step": self._step, "policy": self._mac.snapshot()}

    def load_snapshot(self, snapshot: dict[str, Any]) -> None:
        """Continue from a `snapshot` of this policy."""
        self.reset()
        self._step = snapshot["step"]
        self._mac.load_snapshot(snapshot["policy"])

    def beliefs(self) -> tuple[np.ndarray, np.ndarray] | None:
        """Return what the agents took the units to be at the last `act`, and which of that are guesses.

        Both by agent and node, as `info.layout` orders the units of an observation: features [n, N, D] float32, zero
        where nothing is known; guesses [n, N] bool. None before the first `act`, and for policies that guess nothing.
        """
        found = None if self._last is None else views_of(self._mac, self.info, *self._last)
        return None if found is None or found[1] is None or found[2] is None else (found[1], found[2])

    def act(self, obs: np.ndarray, mask: np.ndarray, full_obs: np.ndarray | None = None) -> np.ndarray:
        """Return the actions [n] int64 for `obs` [n, obs_dim] float32 and available actions `mask` [n, A].

        Continuous actions are [n, d] float32.
        full_obs: [n, obs_dim], observations without range limit. A policy of `use_team_obs` needs them beside `obs`;
            for one of `use_full_obs`, `obs` may be these. Others do not read them.
        Errors: ValueError for other shapes, and where `full_obs` is missing.
        """
        obs, mask = np.asarray(obs, np.float32), np.asarray(mask, bool)
        if self.config.use_team_obs and full_obs is None:
            raise ValueError("use_team_obs=True: the policy also needs full_obs")
        full_obs = obs if full_obs is None else np.asarray(full_obs, np.float32)
        expected = (self.info.n_agents, self.info.obs_dim), (self.info.n_agents, self.info.n_actions)
        if (obs.shape, mask.shape) != expected or full_obs.shape != obs.shape:
            raise ValueError(f"obs {obs.shape} and mask {mask.shape} must be {expected[0]} and {expected[1]}")
        no_state = np.zeros((1, self.info.state_dim), np.float32)
        full = full_obs[None] if self._mac.wants_full_obs else None
        obs = obs.copy()  # the caller may write over it before `beliefs`
        seen = Observation(obs[None], no_state, mask[None], full)
        # A caller's torch has all cores by default, and for sizes as small as these they are far slower than one.
        with _threads(self.config.torch_threads):
            tick = Tick(seen, np.array([self._step]), np.ones(1, bool))
            decision = self._mac.act(tick, None)
        self._step, self._last = self._step + 1, (tick, decision)
        if decision.values is not None:
            found = np.asarray(decision.values[0], np.float32)
            drawn = self.outputs_logits and self.info.box is None
            self.values = probabilities(found, mask) if drawn else found.copy()
        actions = np.asarray(decision.actions[0])
        return actions if self.info.box is None else self.info.box.clip(actions)


def load_policy(path: str | Path, load_step: int = 0) -> LoadedPolicy:
    """Return the trained team of a run.

    Args:
        path: a run's folder, its `models/`, one step's folder, or a published policy ("skirmish/3m/qmix_fast").
        load_step: the step to load, the last one for 0.
    Errors: UserError for a missing or damaged file.
    """
    folder = find_step_folder(policy_path(str(path)), load_step, key="path")
    run_folder = RunFolder(run_folder_of(folder))
    config = validate(read_saved(run_folder.config_json, f"path={path}"))
    info = build.read_env_info(run_folder.env_info_json, f"path={path}")
    with _threads(config.torch_threads):
        return LoadedPolicy(config, info, load_mac(config, info, torch.device("cpu"), folder, "path"))
