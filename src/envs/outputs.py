"""What an environment returns is checked where it enters: shapes, kinds of numbers, finite values, available actions.

Shapes: B battle slots, n agents, A actions.
"""

from __future__ import annotations

import numbers
from typing import Any

import numpy as np

from omagd.config.env_info import EnvInfo
from omagd.envs.protocol import Observation, StepResult
from omagd.utils.errors import UserError

_NUMBERS, _FLAGS = "fiub", "biu"  # kinds of dtypes that hold numbers, and yes or no


def fault(env: str, slot: int, seed: int, step: int, what: str) -> UserError:
    """Return the error of an environment that returned `what`; `step`: steps since the reset from `seed`."""
    return UserError(f"env={env}, slot {slot}, seed {seed}, step {step}: {what}; correct the environment")


def numeric_array(value: Any, shape: tuple[int, ...]) -> tuple[np.ndarray, str]:
    """Return `value` as an array, and what is wrong with its shape or kind: nothing if the text is empty."""
    try:
        array = np.asarray(value)
    except ValueError:  # nested lists of unequal lengths
        return np.empty(0), f"is ragged, not of shape {shape}"
    if array.dtype.kind not in _NUMBERS:
        return array, f"holds {array.dtype}, not numbers"
    return array, "" if array.shape == shape else f"has shape {array.shape}, not {shape}"


def wrong_number(value: Any) -> str:
    """Return what is wrong with a single number (a Python or NumPy scalar): nothing if the text is empty."""
    if isinstance(value, (numbers.Real, np.bool_)) or (isinstance(value, np.ndarray) and value.shape == ()):
        return "" if np.asarray(value).dtype.kind in _NUMBERS else f"is {value!r}, not a number"
    return f"is {value!r} ({type(value).__name__}), not a number"


class OutputChecks:
    """Checks what all slots of an environment show and bring, before anything is learned from it.

    Args:
        info: sizes that were promised. n_slots: B.
    """

    def __init__(self, info: EnvInfo, n_slots: int) -> None:
        b, n = n_slots, info.n_agents
        self.info = info
        self._seen = {"obs": (b, n, info.obs_dim), "state": (b, info.state_dim), "full_obs": (b, n, info.obs_dim)}
        self._avail = (b, n, info.n_actions)
        self._results = {"reward": ((b,), _NUMBERS), "terminated": ((b,), _FLAGS), "truncated": ((b,), _FLAGS)}
        self._results["lost"] = ((b,), _FLAGS)
        if info.agent_rewards:
            self._results["agent_reward"] = ((b, n), _NUMBERS)

    def observation(self, seen: Observation, active: np.ndarray, seeds: np.ndarray, steps: np.ndarray) -> None:
        """Check what the slots `active` [B] bool show, at their `steps` [B] since the resets from `seeds` [B].

        Errors: UserError that names environment, slot, seed, step and field.
        """
        for name, shape in self._seen.items():
            array = getattr(seen, name)
            if array is not None or name != "full_obs":
                self._require(name, array, shape, _NUMBERS, active, seeds, steps)
        mask = seen.avail_actions
        self._require("avail_actions", mask, self._avail, _NUMBERS, active, seeds, steps)
        some = mask.any(-1)
        if not some.all() and not some[active].all():
            slot, agent = (int(place) for place in np.argwhere(~some & active[:, None])[0])
            self._raise(slot, seeds, steps, f"avail_actions of agent {agent} holds no available action")

    def result(self, result: StepResult, stepped: np.ndarray, seeds: np.ndarray, steps: np.ndarray) -> None:
        """Check what a step of the slots `stepped` [B] bool brought. Other arguments and errors as above."""
        for name, (shape, kinds) in self._results.items():
            self._require(name, getattr(result, name), shape, kinds, stepped, seeds, steps)

    def _require(
        self, name: str, array: Any, shape: tuple[int, ...], kinds: str,
        active: np.ndarray, seeds: np.ndarray, steps: np.ndarray,
    ) -> None:  # fmt: skip
        first = int(active.argmax())
        if not isinstance(array, np.ndarray) or array.dtype.kind not in kinds:
            found = array.dtype if isinstance(array, np.ndarray) else type(array).__name__
            self._raise(first, seeds, steps, f"{name} holds {found}, not {'numbers' if kinds == _NUMBERS else 'bool'}")
        if array.shape != shape:
            self._raise(first, seeds, steps, f"{name} has shape {array.shape}, not {shape}")
        if array.dtype.kind != "f" or np.isfinite(array).all():
            return
        wrong = ~np.isfinite(array) & active.reshape(-1, *[1] * (array.ndim - 1))
        if wrong.any():
            slot, *place = (int(index) for index in np.argwhere(wrong)[0])
            where = f"[{', '.join(map(str, place))}]" if place else ""
            self._raise(slot, seeds, steps, f"{name}{where} is {array[(slot, *place)]}, not a finite number")

    def _raise(self, slot: int, seeds: np.ndarray, steps: np.ndarray, what: str) -> None:
        raise fault(self.info.name, slot, int(seeds[slot]), int(steps[slot]), what)
