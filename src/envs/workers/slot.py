"""One slot: executes commands on a single environment and writes its outputs into row `slot` of the shared arrays."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from omagd.envs.outputs import fault, numeric_array, wrong_number, zeros_and_ones
from omagd.envs.protocol import AGENT_REWARD, TRUNCATED, MultiAgentEnv
from omagd.envs.single import OneSlot
from omagd.envs.workers.shared_memory import Arrays
from omagd.utils.errors import UserError
from omagd.utils.registry import locate, owner_of
from omagd.utils.seeding import generator

RESET, STEP, SHOW_FULL, STATS, REPLAY, CHOOSE, FRAME = 1, 2, 3, 4, 5, 6, 7
"""Commands to a slot; 0: none. REPLAY takes the folder."""
RANDOM = "random"
"""The scripted policy that is drawn by the caller, for all slots at once."""
UNSUPPORTED = "unsupported"
"""Reply to REPLAY of an environment without replays."""


class History(NamedTuple):
    """Episode of a slot whose worker died: reset seed (None: no episode), [T, n] actions."""

    seed: int | None
    actions: np.ndarray


class EnvSlot:
    """A single environment whose outputs go into row `slot` of the arrays."""

    def __init__(self, env: MultiAgentEnv, slot: int, arrays: Arrays) -> None:
        self.env = env
        self.slot = slot
        self.arrays = arrays
        self._seed = self._steps = 0
        self._row = {name: array[slot, ...] for name, array in arrays.items() if name != "want_full"}

    def execute(self, command: int, argument: Any = None) -> Any:
        """Execute one command; return the reply: of STEP the numbers in the info, of others what is not in arrays.

        An error of the environment names slot, seed and step.
        """
        try:
            return self._execute(command, argument)
        except Exception as error:
            locate(error, [(self.slot, self._seed, self._steps)])
            raise

    def _execute(self, command: int, argument: Any) -> Any:
        if command == STEP:
            return self._step()
        if command == RESET:
            self._seed, self._steps = int(self.arrays["seeds"][self.slot]), 0
            self.env.reset(seed=self._seed)
            self._show()
        elif command == SHOW_FULL:
            self._show_full()
        elif command == STATS:
            return {name: float(value) for name, value in (self.env.get_stats() or {}).items()}
        elif command == CHOOSE:
            rng = generator(self._seed, "script", self._steps)
            own = (policy for policy in self.env.scripted_policies if policy != RANDOM)
            return {policy: self.env.get_scripted_actions(policy, rng) for policy in own}
        elif command == FRAME:
            return self.env.get_frame()
        elif command == REPLAY:
            try:
                self.env.save_replay(argument)
            except NotImplementedError:
                return UNSUPPORTED
        return None

    def replay(self, history: History) -> None:
        """Replay the episode of a worker that died."""
        if history.seed is None:
            return
        self._seed, self._steps = history.seed, len(history.actions)
        self.env.reset(seed=history.seed)
        for actions in history.actions:
            self.env.step(actions)

    def _step(self) -> dict[str, float]:
        returned = self.env.step(self._row["actions"].copy())
        self._steps += 1
        if not isinstance(returned, tuple | list) or len(returned) != 3:
            many = f" of {len(returned)}" if isinstance(returned, tuple | list) else ""
            raise self._fault(f"step() returned a {type(returned).__name__}{many}, not (reward, terminated, info)")
        reward, terminated, info = returned
        if not isinstance(info, Mapping):
            raise self._fault(f"info is {info!r}, not a dictionary")
        self._write("reward", reward)
        self._write("terminated", terminated, flags=True)
        if self._row["agent_reward"].size:
            self._write("agent_reward", info.get(AGENT_REWARD, ()), name=f"info[{AGENT_REWARD!r}]")
        over, limit = bool(terminated), TRUNCATED if TRUNCATED in info else "episode_limit"
        for key, name in (("truncated", limit), ("lost", "lost")):
            self._write(key, over and info.get(name, False), name=f"info[{name!r}]", flags=True)
        numbers = self._numbers(info)
        self._show()
        return numbers

    def _show(self) -> None:
        self._write("obs", self.env.get_obs())
        self._write("state", self.env.get_state())
        self._write("avail", self.env.get_avail_actions(), name="avail_actions", flags=True)
        if self.arrays["want_full"][0]:
            self._show_full()

    def _show_full(self) -> None:
        self._write("full_obs", self.env.get_obs(no_range_limit=True))

    def _write(self, key: str, value: Any, name: str = "", flags: bool = False) -> None:
        """Write what the environment returned as `name` into the row of the array `key`.

        flags: only zeros and ones are valid. Errors: UserError for a wrong shape or non-numbers.
        """
        row = self._row[key]
        plain = type(value) is np.ndarray and value.dtype == row.dtype and value.shape == row.shape
        if plain or (type(value) is bool and flags and not row.shape):  # most; their checks would take most of the time
            row[...] = value
            return
        array, wrong = numeric_array(value, row.shape)
        if flags and not wrong and array.dtype != bool and not zeros_and_ones(array).all():
            wrong = f"holds {array[~zeros_and_ones(array)][0]}, not 0 or 1"
        if wrong:
            raise self._fault(f"{name or key} {wrong}")
        with np.errstate(over="ignore"):  # `OutputChecks` finds the infinities, for all slots at once
            row[...] = array

    def _fault(self, what: str) -> UserError:
        kind = type(self.env.env if isinstance(self.env, OneSlot) else self.env)
        name = owner_of(kind).removeprefix("env=") or kind.__name__
        return fault(name, self.slot, self._seed, self._steps, what)

    def _numbers(self, info: Mapping[str, Any]) -> dict[str, float]:
        """Return the numbers in `info`, without other values. Errors: UserError if `battle_won` is not a number."""
        found = {}
        for name, value in info.items():
            if name in ("lost", TRUNCATED, AGENT_REWARD):
                continue
            wrong = wrong_number(value)
            if not wrong:
                found[name] = float(value)
            elif name == "battle_won":  # skipping it would silently drop the win rate
                raise self._fault(f"info['battle_won'] {wrong}")
        return found
