"""Checks of what environments return: shapes, dtypes, finite values, at least one available action.

Shapes: B battle slots, n agents, A actions.
"""

from __future__ import annotations

import numbers
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, NoReturn

import numpy as np

from omagd.config.env_info import EnvInfo
from omagd.envs.protocol import Observation, StepResult
from omagd.utils.errors import UserError

_NUMBERS, _FLAGS = "fiub", "biu"  # dtype kinds of numbers and of flags

RESERVED = re.compile("stage|epoch|t_env|task|slot|seed|length|return|return_agent_.*|ep_length|q_taken|target|test_.*")
"""Names that an environment's info must not use: keys of `episodes/` or, with `_mean`, of `metrics.jsonl`."""


def fault(env: str, slot: int, seed: int, step: int, what: str) -> UserError:
    """Return the error for an environment that returned `what`; `step`: steps since the reset from `seed`."""
    return UserError(f"env={env}, slot {slot}, seed {seed}, step {step}: {what}; correct the environment")


def numeric_array(value: Any, shape: tuple[int, ...]) -> tuple[np.ndarray, str]:
    """Return `value` as an array, and what is wrong with its shape or dtype ("" if nothing)."""
    try:
        array = np.asarray(value)
    except ValueError:  # nested lists of unequal lengths
        return np.empty(0), f"is ragged, not of shape {shape}"
    if array.dtype.kind not in _NUMBERS:
        return array, f"holds {array.dtype}, not numbers"
    return array, "" if array.shape == shape else f"has shape {array.shape}, not {shape}"


def ends_of(terminated: Any, truncated: Any) -> tuple[bool, bool]:
    """Return whether an episode has ended, and whether it was only cut off; flags of one or of all agents."""
    if terminated is False and truncated is False:  # of most steps
        return False, False
    over = bool(np.all(np.logical_or(terminated, truncated)))
    cut = over and bool(np.any(np.logical_and(truncated, np.logical_not(terminated))))
    return over and not cut, cut


def as_vector(value: Any, declared: np.dtype[Any] | None = None) -> np.ndarray:
    """Return an array as a vector; bytes of images, which have at least three dimensions, as numbers from 0 to 1.

    declared: type of the space; some environments return its bytes as longer integers.
    """
    array = np.asarray(value)
    image = array.ndim > 2 and array.dtype.kind in "iu" and np.uint8 in (array.dtype, declared)
    # As Mnih et al. 2015 do: inputs of about 1 suit the initial weights.
    return array.ravel() / np.float32(255) if image else array.ravel()


def wrong_number(value: Any) -> str:
    """Return what is wrong with a number (a Python or NumPy scalar), "" if nothing."""
    if isinstance(value, (numbers.Real, np.bool_)) or (isinstance(value, np.ndarray) and value.shape == ()):
        return "" if np.asarray(value).dtype.kind in _NUMBERS else f"is {value!r}, not a number"
    return f"is {value!r} ({type(value).__name__}), not a number"


def zeros_and_ones(array: np.ndarray) -> np.ndarray:
    """Return where a numeric array holds 0 or 1."""
    return (array == 0) | (array == 1)


class _Where(NamedTuple):
    """The slots to check, [B] bool, and seeds and steps [B] for the error message."""

    active: np.ndarray
    seeds: np.ndarray
    steps: np.ndarray


class OutputChecks:
    """Checks the observations and results of a batched environment before they are stored or learned from."""

    def __init__(self, info: EnvInfo, n_slots: int) -> None:
        b, n = n_slots, info.n_agents
        self.info = info
        self._seen = {"obs": (b, n, info.obs_dim), "state": (b, info.state_dim), "full_obs": (b, n, info.obs_dim)}
        self._avail = (b, n, info.n_actions)
        self._each: tuple[int, ...] = (b,)
        self._rewards = {"reward": self._each, **({"agent_reward": (b, n)} if info.agent_rewards else {})}

    def observation(
        self, seen: Observation, active: np.ndarray, seeds: np.ndarray, steps: np.ndarray, full: bool = False
    ) -> Observation:
        """Check the observations of the slots `active` [B] bool; return them with masks as bool.

        Args:
            seeds: [B], of the last resets. steps: [B], since then. full: whether `full_obs` was requested.

        Errors: UserError that names environment, slot, seed, step and field.
        """
        where = _Where(active, seeds, steps)
        if not isinstance(seen, Observation):
            self._raise_first(where, f"observe() returned {_kind(seen)}, not an Observation")
        for name, shape in self._seen.items():
            array = getattr(seen, name)
            if array is not None or full or name != "full_obs":
                self._require(name, array, shape, where)
        mask = self._bools("avail_actions", seen.avail_actions, self._avail, where, _NUMBERS)
        some = np.logical_or.reduce(mask, -1)
        if not some.all() and not some[active].all():
            slot, agent = (int(place) for place in np.argwhere(~some & active[:, None])[0])
            self._raise(slot, where, f"avail_actions of agent {agent} holds no available action")
        return seen if mask is seen.avail_actions else replace(seen, avail_actions=mask)

    def result(self, result: StepResult, stepped: np.ndarray, seeds: np.ndarray, steps: np.ndarray) -> StepResult:
        """Check the results of the slots `stepped` [B] bool; return them with flags as bool.

        `info` is checked where an episode has ended and is not lost. Other arguments and errors: as `observation`.
        """
        where = _Where(stepped, seeds, steps)
        if not isinstance(result, StepResult):
            self._raise_first(where, f"step() returned {_kind(result)}, not a StepResult")
        for name, shape in self._rewards.items():
            self._require(name, getattr(result, name), shape, where)
        flags: dict[str, Any] = {name: getattr(result, name) for name in ("terminated", "truncated", "lost")}
        bools: dict[str, Any] = {
            name: self._bools(name, array, self._each, where, _FLAGS) for name, array in flags.items()
        }
        if any(bools[name] is not array for name, array in flags.items()):
            result = replace(result, **bools)
        if not isinstance(result.info, Mapping):
            self._raise_first(where, f"info is {_kind(result.info)}, not a dictionary")
        ended = result.terminated & ~result.lost & stepped
        if ended.any():
            self._require_results(result.info, _Where(ended, seeds, steps))
        return result

    def _require_results(self, results: Mapping[Any, Any], where: _Where) -> None:
        """Check the results of episodes: name -> [B] numbers."""
        for name, array in results.items():
            if not isinstance(name, str) or not name.isprintable():
                self._raise_first(where, f"info holds the name {name!r}, which is not printable text")
            if RESERVED.fullmatch(name):
                self._raise_first(where, f"info holds the name {name!r}, which the run's own records use")
            self._require(f"info[{name!r}]", array, self._each, where)

    def lengths(self, playing: np.ndarray, seeds: np.ndarray, steps: np.ndarray) -> None:
        """Check that no episode of the slots `playing` [B] bool exceeds its step limit. Errors: as `observation`."""
        if steps.max() < self.info.episode_limit:
            return
        where = _Where(playing & (steps >= self.info.episode_limit), seeds, steps)
        if where.active.any():
            self._raise_first(where, f"the episode goes on after its limit of {self.info.episode_limit} steps")

    def _require(
        self, name: str, array: Any, shape: tuple[int, ...], where: _Where, kinds: str = _NUMBERS
    ) -> None:  # fmt: skip
        """Check that a field is a numeric array of the promised shape whose values are finite in float32."""
        if not isinstance(array, np.ndarray) or array.dtype.kind not in kinds or not array.dtype.isnative:
            self._raise_first(where, f"{name} holds {_kind(array)}, not {'numbers' if kinds == _NUMBERS else 'bool'}")
        if array.shape != shape:
            self._raise_first(where, f"{name} has shape {array.shape}, not {shape}")
        if array.dtype.kind != "f":
            return
        finite = _finite_as_float32(array)
        if not finite.all():
            self._require_all(name, array, finite, where, "a finite number in float32")

    def _bools(self, name: str, array: Any, shape: tuple[int, ...], where: _Where, kinds: str) -> np.ndarray:
        """Return a field of bools, or of zeros and ones, as bool."""
        self._require(name, array, shape, where, kinds)
        if array.dtype == bool:
            return array
        good = zeros_and_ones(array)
        if not good.all():
            self._require_all(name, array, good, where, "0 or 1")
        return array.astype(bool)

    def _require_all(self, name: str, array: np.ndarray, good: np.ndarray, where: _Where, wanted: str) -> None:
        """Raise for the first value of a checked slot that is not `good`; other slots are ignored."""
        wrong = ~good & where.active.reshape(-1, *[1] * (array.ndim - 1))
        if wrong.any():
            slot, *place = (int(index) for index in np.argwhere(wrong)[0])
            at = f"[{', '.join(map(str, place))}]" if place else ""
            self._raise(slot, where, f"{name}{at} is {array[(slot, *place)]}, not {wanted}")

    def _raise_first(self, where: _Where, what: str) -> NoReturn:
        self._raise(int(where.active.argmax()), where, what)

    def _raise(self, slot: int, where: _Where, what: str) -> NoReturn:
        raise fault(self.info.name, slot, int(where.seeds[slot]), int(where.steps[slot]), what)


def _finite_as_float32(array: np.ndarray) -> np.ndarray:
    """Return where floats are finite after conversion to float32, the dtype of episodes and networks."""
    if array.dtype.itemsize > 4:
        with np.errstate(over="ignore"):
            array = array.astype(np.float32)
    return np.isfinite(array)


def _kind(value: Any) -> str:
    """Return the dtype of an array, or the type of another value, for error messages."""
    if not isinstance(value, np.ndarray):
        return type(value).__name__
    return str(value.dtype) if value.dtype.isnative else f"{value.dtype.newbyteorder()} in another machine's byte order"


def results_of(info: Mapping[Any, Any]) -> dict[str, Any]:
    """Return what an environment says by name; names that the run's own records use begin with `env_`."""
    named = {name: value for name, value in info.items() if isinstance(name, str)}
    # "lost" would mean that a process has died.
    return {(f"env_{key}" if key == "lost" or RESERVED.fullmatch(key) else key): named[key] for key in named}


def counted_together(each: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the counters of several environments: sums; of "*_rate" the mean, of "*_build" the maximum."""
    total: dict[str, float] = {}
    for name in dict.fromkeys(name for stats in each for name in stats):
        values = [stats.get(name, 0.0) for stats in each]
        total[name] = max(values) if name.endswith("_build") else sum(values)
        if name.endswith("_rate"):
            total[name] /= len(each)
    return total
