"""Invalid outputs of environments are rejected with one line that names environment, slot, seed, step and field."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from runner_toys import FakeEnv, Probe, length_of, runner_of
from walk_env import Walk, WalkArgs

from omagd.envs.outputs import RESERVED
from omagd.envs.protocol import Observation, StepResult
from omagd.envs.workers.process_envs import ProcessEnvs
from omagd.envs.workers.vector import SerialEnvs
from omagd.run.reporting.log_sinks import EpisodeLog
from omagd.utils.errors import UserError

torch.set_num_threads(1)
SLOT, STEP = 2, 1


class Faulty(FakeEnv):
    """Replaces one value of one field in one slot at one step; slots that have ended show other numbers."""

    def __init__(self, field: str, value: Any) -> None:
        super().__init__(4)
        self.field, self.value, self.spoilt = field, value, -1

    def _here(self) -> bool:
        if self.t[SLOT] == STEP and self.over.sum() < 4:
            self.spoilt = int(self.seed[SLOT])
            return True
        return False

    def observe(self, full: bool = False) -> Observation:
        seen = super().observe(full)
        seen.obs[self.over] = 7.0
        if self._here():
            return self._replace(seen)
        return seen

    def step(self, actions: np.ndarray, active: np.ndarray) -> StepResult:
        result = super().step(actions, active)
        return self._replace(result) if self._here() and active[SLOT] else result

    def _replace(self, shown: Any) -> Any:
        if not hasattr(shown, self.field):
            return shown
        array = getattr(shown, self.field)
        if callable(self.value):
            setattr(shown, self.field, self.value(array))
        else:
            place = (SLOT, 0) if self.field == "avail_actions" else (SLOT, *[0] * (array.ndim - 1))
            array[place] = self.value
        return shown


def at_slot(dtype: type, value: float) -> Any:
    """Return what gives an array this dtype and this value at the first place of the slot."""

    def changed(array: np.ndarray) -> np.ndarray:
        array = array.astype(dtype)
        array[(SLOT, *[0] * (array.ndim - 1))] = value
        return array

    return changed


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("obs", np.nan, "obs[0, 0] is nan, not a finite number in float32"),
        ("state", np.inf, "state[0] is inf, not a finite number in float32"),
        ("reward", np.nan, "reward is nan, not a finite number in float32"),
        ("avail_actions", False, "avail_actions of agent 0 holds no available action"),
        ("obs", lambda array: array[:, :, :2], "obs has shape (4, 2, 2), not (4, 2, 3)"),
        ("reward", lambda array: array[:, None], "reward has shape (4, 1), not (4,)"),
        ("reward", lambda array: array.astype(str), "reward holds <U32, not numbers"),
        ("terminated", lambda array: array.astype(np.float32), "terminated holds float32, not bool"),
        ("reward", at_slot(np.float64, 1e300), "reward is 1e+300, not a finite number in float32"),
        ("state", at_slot(np.longdouble, -1e39), "state[0] is -1e+39, not a finite number in float32"),
        ("full_obs", lambda array: None, "full_obs holds NoneType, not numbers"),
        ("obs", lambda array: array.astype(">f4"), "obs holds float32 in another machine's byte order, not numbers"),
        ("terminated", at_slot(np.int64, -7), "terminated is -7, not 0 or 1"),
        ("avail_actions", at_slot(np.int64, -1), "avail_actions[0, 0] is -1, not 0 or 1"),
        ("avail_actions", at_slot(np.int64, 256), "avail_actions[0, 0] is 256, not 0 or 1"),
        ("info", lambda info: None, "info is NoneType, not a dictionary"),
    ],
)
def test_a_fault_is_named_with_environment_slot_seed_step_and_field(field: str, value: Any, message: str) -> None:
    env = Faulty(field, value)
    with pytest.raises(UserError) as caught:
        runner_of(env).run(Probe(), explore=None, episodes_per_slot=6, full_obs=True)
    slot = SLOT if ("is " in message or "no available" in message) and field != "info" else 0
    step = STEP - (field in {"reward", "terminated", "lost", "info"})
    first = f"env=fake, slot {slot}, seed "
    assert caught.value.message.startswith(first), caught.value.message
    assert caught.value.message.endswith(f"{message}; correct the environment")
    if slot == SLOT:
        assert f"seed {env.spoilt}, step {step}: " in caught.value.message
    assert length_of(env.spoilt) >= STEP


class Reports(FakeEnv):
    """Changes the results of episodes, or all that one call returns."""

    def __init__(self, change: Any, call: str = "step") -> None:
        super().__init__(4)
        self.change, self.call = change, call

    def observe(self, full: bool = False) -> Observation:
        seen = super().observe(full)
        return self.change(seen) if self.call == "observe" else seen

    def step(self, actions: np.ndarray, active: np.ndarray) -> StepResult:
        result = super().step(actions, active)
        if self.call == "step":
            return self.change(result)
        if self.call == "info":
            result.info = {name: self.change(values) for name, values in result.info.items()}
        if self.call == "name":
            result.info[self.change] = np.ones(4)
        return result


@pytest.mark.parametrize(
    ("call", "change", "message"),
    [
        ("step", lambda result: (), "step() returned tuple, not a StepResult"),
        ("observe", lambda seen: seen.obs, "observe() returned float32, not an Observation"),
        ("info", lambda values: np.full(4, np.nan), "info['battle_won'] is nan, not a finite number in float32"),
        ("info", lambda values: values.astype(str), "info['battle_won'] holds <U32, not numbers"),
        ("info", lambda values: np.zeros((7, 3)), "info['battle_won'] has shape (7, 3), not (4,)"),
        ("name", "t_env", "info holds the name 't_env', which the run's own records use"),
        ("name", "a\x1b[31m", "info holds the name 'a\\x1b[31m', which is not printable text"),
        ("name", 3, "info holds the name 3, which is not printable text"),
    ],
)
def test_invalid_results_are_named(call: str, change: Any, message: str) -> None:
    with pytest.raises(UserError, match=r"^env=fake, slot \d, seed \d+, step \d+: ") as caught:
        runner_of(Reports(change, call)).run(Probe(), explore=None)
    assert caught.value.message.endswith(f": {message}; correct the environment")


def test_zeros_and_ones_count_as_bools_and_results_of_unfinished_episodes_are_ignored() -> None:
    def as_numbers(result: StepResult) -> StepResult:
        going_on = {name: np.where(result.terminated, values, np.nan) for name, values in result.info.items()}
        flags = {name: getattr(result, name).astype(np.int64) for name in ("terminated", "truncated", "lost")}
        return StepResult(result.reward, info=going_on, **flags)

    class Numbers(Reports):
        def avail(self) -> np.ndarray:
            return super().avail().astype(np.float64)

    one, other = (
        runner_of(env).run(Probe(), explore=None, episodes_per_slot=4) for env in (Numbers(as_numbers), FakeEnv(4))
    )
    assert one.log == other.log and one.stats == other.stats
    for mine, theirs in zip(one.episodes, other.episodes, strict=True):
        assert all(torch.equal(mine[name], theirs[name]) for name in theirs)


def test_keys_of_the_episode_log_are_reserved(tmp_path: Path) -> None:
    rollout = runner_of(FakeEnv(4)).run(Probe(), explore=None)
    rollout.log[0]["t_env"] = -1.0  # an environment's, if it were let through
    log = EpisodeLog(tmp_path / "rank_0.jsonl")
    log.write(rollout.log, t_env=40)
    lines = [json.loads(line) for line in log.path.read_text().splitlines()]
    log.close()
    assert [line["t_env"] for line in lines] == [40] * 4
    own = set(lines[1]) - {"battle_won", "dead_enemies"}
    assert own == {"t_env", "slot", "seed", "length", "return"} and all(RESERVED.fullmatch(name) for name in own)


def test_observations_of_ended_slots_are_not_checked() -> None:
    class Late(FakeEnv):
        def observe(self, full: bool = False) -> Observation:
            seen = super().observe(full)
            seen.obs[self.over & (self.ended_at < self.looks)] = np.nan
            self.looks += 1
            self.ended_at = np.where(self.over, np.minimum(self.ended_at, self.looks), 10**6)
            return seen

    env = Late(3)
    env.looks, env.ended_at = 0, np.full(3, 10**6)
    rollout = runner_of(env).run(Probe(), explore=None)
    assert rollout.n_episodes == 3 and all(episode["obs"].isfinite().all() for episode in rollout.episodes)


class Sloppy(Walk):
    """A single environment whose types or shapes are wrong from its second step on."""

    def step(self, actions: np.ndarray) -> tuple[Any, bool, Any]:
        reward, terminated, info = super().step(actions)
        if self.t < 2:
            return reward, terminated, info
        broken = self.args.broken
        wrong = {"text": str(reward), "complex": 1j}
        many = dict.fromkeys(map(str, range(40)), 1.0)
        reports = {"info": [], "won": {"battle_won": "yes"}, "many": many, "void": {"lost": [1, 2]}}
        ended = {"minus": -7, "void": 1}.get(broken, terminated)
        return wrong.get(broken, reward), ended, reports.get(broken, info)

    def get_avail_actions(self) -> Any:
        mask = np.asarray(super().get_avail_actions())
        return mask * -1 if self.t > 1 and self.args.broken == "mask" else mask

    def get_obs(self, no_range_limit: bool = False) -> Any:
        seen = super().get_obs(no_range_limit)
        changed = {"flat": seen[:, :1], "ragged": [[1.0], [1.0, 2.0]]}
        return changed.get(self.args.broken, seen) if self.t > 1 else seen


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        ("text", "reward is '"),
        ("complex", "reward is 1j"),
        ("info", "info is [], not a dictionary"),
        ("flat", "obs has shape (2, 1), not (2, 2)"),
        ("ragged", "obs is ragged, not of shape (2, 2)"),
        ("minus", "terminated is -7, not 0 or 1"),
        ("mask", "avail_actions holds -1, not 0 or 1"),
        ("won", "info['battle_won'] is 'yes' (str), not a number"),
        ("many", "info holds more than 32 numbers; one too many is '3"),
        ("void", "info['lost'] is [1, 2] (list), not a number"),
    ],
)
def test_types_and_shapes_of_single_environments_are_not_converted(broken: str, message: str) -> None:
    env = SerialEnvs(Sloppy, WalkArgs(broken=broken), 2)
    with pytest.raises(UserError, match="^env=Sloppy, slot 1, seed 6, step 2: ") as caught:
        env.reset(np.array([False, True]), np.array([5, 6]))
        for _ in range(3):
            env.step(np.zeros((2, 2), int), np.array([False, True]))
    assert message in caught.value.message


@pytest.mark.processes
def test_a_worker_raises_the_same_error() -> None:
    env = ProcessEnvs(Sloppy, WalkArgs(broken="flat"), 1)
    with pytest.raises(UserError, match=r"^env=Sloppy, slot 0, seed 6, step 2: obs has shape \(2, 1\), not \(2, 2\)"):
        env.reset(np.ones(1, bool), np.array([6]))
        for _ in range(3):
            env.step(np.zeros((1, 2), int), np.ones(1, bool))
