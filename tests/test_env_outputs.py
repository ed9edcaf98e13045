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
from omagd.envs.workers.vector import SerialEnvs
from omagd.run.reporting.log_sinks import EpisodeLog
from omagd.utils.errors import UserError

SLOT, STEP = 2, 1


class Faulty(FakeEnv):
    """Changes a field of what it returns while one slot is at one step (`info`: always), or all that one call returns.

    Slots that ended before the last observation show NaN, which is not checked.
    """

    def __init__(self, field: str = "", change: Any = None) -> None:
        super().__init__(4)
        self.field, self.change, self.faulty_seed, self.shown_over = field, change, -1, self.over.copy()

    def observe(self, full: bool = False) -> Observation:
        seen = super().observe(full)
        seen.obs[self.over & self.shown_over] = np.nan
        self.shown_over = self.over.copy()
        return self._changed("observe", seen)

    def step(self, actions: np.ndarray, active: np.ndarray) -> StepResult:
        result = super().step(actions, active)
        return self._changed("step", result) if active[SLOT] or self.field == "info" else result

    def _changed(self, call: str, shown: Any) -> Any:
        if self.field == call:
            return self.change(shown)
        here = (self.t[SLOT] == STEP and not self.over.all()) or self.field == "info"
        if here and hasattr(shown, self.field):
            self.faulty_seed = int(self.seed[SLOT])
            setattr(shown, self.field, self.change(getattr(shown, self.field)))
        return shown


def at_slot(value: float, dtype: Any = None) -> Any:
    """Return a function that gives an array this dtype and this value at the first place of the slot."""

    def changed(array: np.ndarray) -> np.ndarray:
        array = array.astype(dtype or array.dtype)
        array[(SLOT, *[0] * (array.ndim - 1))] = value
        return array

    return changed


def results(change: Any) -> Any:
    return lambda info: {name: change(values) for name, values in info.items()}


def named(name: Any) -> Any:
    return lambda info: {**info, name: np.ones(4)}


ONE_SLOT = [  # the slot, its seed and its step are named
    ("obs", at_slot(np.nan), "obs[0, 0] is nan, not a finite number in float32"),
    ("state", at_slot(np.inf), "state[0] is inf, not a finite number in float32"),
    ("reward", at_slot(np.nan), "reward is nan, not a finite number in float32"),
    ("avail_actions", lambda mask: mask & (np.arange(4) != SLOT)[:, None, None],
     "avail_actions of agent 0 holds no available action"),
    ("state", at_slot(-1e39, np.longdouble), "state[0] is -1e+39, not a finite number in float32"),
    ("terminated", at_slot(-7, np.int64), "terminated is -7, not 0 or 1"),
    ("avail_actions", at_slot(-1, np.int64), "avail_actions[0, 0] is -1, not 0 or 1"),
]  # fmt: skip
ALL_SLOTS = [
    ("obs", lambda array: array[:, :, :2], "obs has shape (4, 2, 2), not (4, 2, 3)"),
    ("reward", lambda array: array[:, None], "reward has shape (4, 1), not (4,)"),
    ("terminated", lambda array: array.astype(np.float32), "terminated holds float32, not bool"),
    ("full_obs", lambda array: None, "full_obs holds NoneType, not numbers"),
    ("obs", lambda array: array.astype(">f4"), "obs holds float32 in another machine's byte order, not numbers"),
    ("step", lambda result: (), "step() returned tuple, not a StepResult"),
    ("observe", lambda seen: seen.obs, "observe() returned float32, not an Observation"),
    ("info", lambda info: None, "info is NoneType, not a dictionary"),
    ("info", results(lambda values: values * np.nan), "info['battle_won'] is nan, not a finite number in float32"),
    ("info", named("t_env"), "info holds the name 't_env', which the run's own records use"),
    ("info", named("a\x1b[31m"), "info holds the name 'a\\x1b[31m', which is not printable text"),
]


@pytest.mark.parametrize(("field", "change", "message"), ONE_SLOT + ALL_SLOTS)
def test_a_fault_is_named_with_environment_slot_seed_step_and_field(field: str, change: Any, message: str) -> None:
    env = Faulty(field, change)
    with pytest.raises(UserError, match=r"^env=fake, slot \d, seed \d+, step \d+: ") as caught:
        runner_of(env).run(Probe(), explore=None, episodes_per_slot=6, full_obs=True)
    assert caught.value.message.endswith(f": {message}; correct the environment")
    if (field, change, message) in ONE_SLOT:
        step = STEP - (field in {"reward", "terminated"})
        assert f"slot {SLOT}, seed {env.faulty_seed}, step {step}: " in caught.value.message
        assert length_of(env.faulty_seed) >= STEP


def test_zeros_and_ones_count_as_bools_and_results_of_unfinished_episodes_are_ignored() -> None:
    def as_numbers(result: StepResult) -> StepResult:
        going_on = {name: np.where(result.terminated, values, np.nan) for name, values in result.info.items()}
        flags = {name: getattr(result, name).astype(np.int64) for name in ("terminated", "truncated", "lost")}
        return StepResult(result.reward, info=going_on, **flags)

    class Numbers(Faulty):
        def avail(self) -> np.ndarray:
            return super().avail().astype(np.float64)

    envs = Numbers("step", as_numbers), FakeEnv(4)
    one, other = (runner_of(env).run(Probe(), explore=None, episodes_per_slot=4) for env in envs)
    assert one.log == other.log and one.stats == other.stats
    for mine, theirs in zip(one.episodes, other.episodes, strict=True):
        assert all(torch.equal(mine[name], theirs[name]) for name in theirs)


def test_keys_of_the_episode_log_are_reserved(tmp_path: Path) -> None:
    rollout = runner_of(FakeEnv(4)).run(Probe(), explore=None)
    rollout.log[0]["t_env"] = -1.0  # an environment's, if it were let through
    log = EpisodeLog(tmp_path / "rank_0.jsonl")
    log.add(rollout.log, t_env=40)
    lines = [json.loads(line) for line in log.path.read_text().splitlines()]
    log.close()
    assert [line["t_env"] for line in lines] == [40] * 4
    own = set(lines[1]) - {"battle_won", "dead_enemies"}
    assert own == {"t_env", "slot", "seed", "length", "return"} and all(RESERVED.fullmatch(name) for name in own)


@pytest.mark.parametrize(("method", "change", "message"), [
    ("step", lambda returned: (str(returned[0]), *returned[1:]), "reward holds <U"),
    ("step", lambda returned: (1j, *returned[1:]), "reward holds complex128, not numbers"),
    ("step", lambda returned: (*returned[:2], []), "info is [], not a dictionary"),
    ("step", lambda returned: (returned[0], -7, returned[2]), "terminated holds -7, not 0 or 1"),
    ("step", lambda returned: (*returned[:2], {"battle_won": "yes"}), "info['battle_won'] is 'yes' (str), not a"),
    ("step", lambda returned: (returned[0], 1, {"lost": [1, 2]}), "info['lost'] has shape (2,), not ()"),
    ("get_obs", lambda seen: [[1.0], [1.0, 2.0]], "obs is ragged, not of shape (2, 2)"),
    ("get_obs", lambda seen: seen[:, :1], "obs has shape (2, 1), not (2, 2)"),
    ("get_avail_actions", lambda mask: mask * -1, "avail_actions holds -1, not 0 or 1"),
])  # fmt: skip
def test_types_and_shapes_of_single_environments_are_not_converted(monkeypatch, method, change, message) -> None:
    """They are wrong from the second step on."""
    plain = getattr(Walk, method)

    def changed(self: Walk, *given: Any, **more: Any) -> Any:
        returned = plain(self, *given, **more)
        return change(returned) if self.t > 1 else returned

    monkeypatch.setattr(Walk, method, changed)
    env = SerialEnvs(Walk, WalkArgs(), 2)
    with pytest.raises(UserError, match="^env=Walk, slot 1, seed 6, step 2: ") as caught:
        env.reset(np.array([False, True]), np.array([5, 6]))
        for _ in range(3):
            env.step(np.zeros((2, 2), int), np.array([False, True]))
    assert message in caught.value.message
