"""What an environment returns is refused where it enters, in one line that says where it came from."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from runner_toys import FakeEnv, Probe, length_of, runner_of
from test_adapters import Walk, WalkArgs

from omagd.envs.adapters import SerialEnvs
from omagd.envs.process_envs import ProcessEnvs
from omagd.envs.protocol import Observation, StepResult
from omagd.utils.errors import UserError

torch.set_num_threads(1)
SLOT, STEP = 2, 1


class Faulty(FakeEnv):
    """Spoils one place of one field in one slot at one step, and shows anything where nobody looks."""

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


@pytest.mark.parametrize(
    ("field", "value", "told"),
    [
        ("obs", np.nan, "obs[0, 0] is nan, not a finite number"),
        ("state", np.inf, "state[0] is inf, not a finite number"),
        ("full_obs", -np.inf, "full_obs[0, 0] is -inf, not a finite number"),
        ("reward", np.nan, "reward is nan, not a finite number"),
        ("avail_actions", False, "avail_actions of agent 0 holds no available action"),
        ("obs", lambda array: array[:, :, :2], "obs has shape (4, 2, 2), not (4, 2, 3)"),
        ("reward", lambda array: array[:, None], "reward has shape (4, 1), not (4,)"),
        ("reward", lambda array: array.astype(str), "reward holds <U32, not numbers"),
        ("state", lambda array: array.tolist(), "state holds list, not numbers"),
        ("terminated", lambda array: array.astype(np.float32), "terminated holds float32, not bool"),
    ],
)
def test_a_fault_is_named_with_environment_slot_seed_step_and_field(field: str, value: Any, told: str) -> None:
    env = Faulty(field, value)
    with pytest.raises(UserError) as caught:
        runner_of(env).run(Probe(), explore=None, episodes_per_slot=6, full_obs=True)
    slot = SLOT if "is " in told or "no available" in told else 0
    step = STEP - (field in {"reward", "terminated"})
    first = f"env=fake, slot {slot}, seed "
    assert caught.value.message.startswith(first), caught.value.message
    assert caught.value.message.endswith(f"{told}; correct the environment")
    if slot == SLOT:
        assert f"seed {env.spoilt}, step {step}: " in caught.value.message
    assert length_of(env.spoilt) >= STEP


def test_what_slots_show_that_nobody_looks_at_is_not_checked() -> None:
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
        wrong = {"text": str(reward), "pair": np.array([reward, reward]), "none": None, "complex": 1j}
        return wrong.get(broken, reward), terminated, [] if broken == "info" else info

    def get_obs(self, no_range_limit: bool = False) -> Any:
        seen = super().get_obs(no_range_limit)
        changed = {"flat": seen[:, :1], "ragged": [[1.0], [1.0, 2.0]], "words": seen.astype(str)}
        return changed.get(self.args.broken, seen) if self.t > 1 else seen


@pytest.mark.parametrize(
    ("broken", "told"),
    [
        ("text", "reward is '"),
        ("pair", "reward is array("),
        ("none", "reward is None"),
        ("complex", "reward is 1j"),
        ("info", "info is [], not a dictionary"),
        ("flat", "obs has shape (2, 1), not (2, 2)"),
        ("ragged", "obs is ragged, not of shape (2, 2)"),
        ("words", "obs holds <U32, not numbers"),
    ],
)
def test_a_single_environments_types_and_shapes_are_not_bent_until_they_fit(broken: str, told: str) -> None:
    env = SerialEnvs(Sloppy, WalkArgs(broken=broken), 2)
    with pytest.raises(UserError, match="^env=Sloppy, slot 1, seed 6, step 2: ") as caught:
        env.reset(np.array([False, True]), np.array([5, 6]))
        for _ in range(3):
            env.step(np.zeros((2, 2), int), np.array([False, True]))
    assert told in caught.value.message


@pytest.mark.processes
def test_a_worker_hands_the_same_line_on() -> None:
    env = ProcessEnvs(Sloppy, WalkArgs(broken="flat"), 1)
    with pytest.raises(UserError, match=r"^env=Sloppy, slot 0, seed 6, step 2: obs has shape \(2, 1\), not \(2, 2\)"):
        env.reset(np.ones(1, bool), np.array([6]))
        for _ in range(3):
            env.step(np.zeros((1, 2), int), np.ones(1, bool))
