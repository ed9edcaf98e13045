"""Observations, actions and rewards follow SMAC, over a batch of battles and for any back-end.

Source: oxwhirl/smac, starcraft2.py, including its quirks. In a medivac's observation, feature 0 of enemy i is whether
the medivac may heal ally i (`get_obs_agent`). A move is tested half a move ahead at integer cells (`can_move`). Sight
is `<`, weapon range is `<=`. Own losses do not count by default, and regenerating enemy shields give a reward
(`reward_battle`).
Shapes: B slots, n agents, m enemies, U = n + m, A = 6 + m actions.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np

from omagd.envs.battle.actions import SHOOT_RANGE, ActionRules, Geometry
from omagd.envs.battle.args import N_NORMAL_ACTIONS, BattleArgs
from omagd.envs.battle.backend import BattleBackend
from omagd.envs.battle.features import FeatureWriter, UnitTables, entity_layout, state_component
from omagd.envs.battle.maps import HEALING, MapSpec
from omagd.envs.battle.reward import RewardLedger, judge
from omagd.envs.battle.units import UNITS
from omagd.envs.frames import AGENTS, COMPASS, OPPONENTS, Frame, Scene, rounded, unit_names
from omagd.envs.protocol import BatchedEnv, Observation, StepResult, require_available


class BattleSemantics:
    """Observations, masks, orders, rewards and episode ends of all battles of one back-end.

    Call `begin` after `backend.reset`. A step is `orders`, `backend.advance`, `finish_step`.

    Args:
        spec: the map. args: SMAC's flags. backend: simulates the battles.

    Attributes:
        layout: entity layout of an observation.
        steps: [B] int, steps played in the current episodes. ended: [B] bool, ended and not reset yet.
    """

    def __init__(self, spec: MapSpec, args: BattleArgs, backend: BattleBackend) -> None:
        n_slots, n, n_actions = backend.n_slots, spec.n_agents, args.variant.n_actions(spec)
        self._args, self._backend, self._n, self._limit = args, backend, n, spec.limit
        self._spec = spec
        self._walls: tuple[tuple[float, float, float, float], ...] | None = None
        self._sizes = np.array([n, spec.n_enemies])
        self._heals = spec.map_type in HEALING
        self._no_medivac = np.zeros((n_slots, n + spec.n_enemies), bool)
        self._tables = UnitTables(spec)
        self.layout = entity_layout(spec, args)
        sizes = n_slots, n, spec.n_enemies
        self._rules = ActionRules(spec, args, backend.terrain)
        self._ledger = RewardLedger(args, *sizes)
        self._geometry = Geometry(*sizes)
        self._writer = FeatureWriter(spec, args, self._tables, backend.terrain, n_slots)
        self._avail = self._within_reach = np.zeros((n_slots, n, n_actions), bool)
        self._sight: float | np.ndarray = spec.sight_range
        self._obs = np.zeros((n_slots, n, self.layout.obs_dim), np.float32)
        self._full = np.zeros_like(self._obs)
        self._state = np.zeros((n_slots, sum(state_component(spec, args))), np.float32)
        self._last_action = np.zeros((n_slots, n, n_actions), np.float32)
        self._onehot = np.eye(n_actions, dtype=np.float32)
        self.steps = np.zeros(n_slots, np.int64)
        self.ended = np.ones(n_slots, bool)
        self._counters = {"battles_won": 0, "battles_game": 0, "timeouts": 0}
        self._stale = True
        self._any_medivacs = False  # SMACv2: any number of enemy medivacs alone is defeated (`judge`)

    def begin(self, which: np.ndarray, seeds: np.ndarray | None = None) -> None:
        """Start episodes in the slots `which` [B] bool, where the back-end has started new battles.

        seeds: [B], of the battles; not used by SMAC's rules, which are not random.
        """
        self._ledger.reset(which, self._backend.units)
        self._last_action[which] = 0.0
        self.steps[which] = 0
        self.ended[which] = False
        self._stale = True

    def orders(self, actions: np.ndarray, active: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Check `actions` [B, n] of the `active` slots and return (order, target, dest) for the back-end.

        Errors: ValueError for an action that is not available, or a slot whose episode is over.
        """
        self._require_playable(actions, active)
        chosen = np.where(active[:, None], actions, 0)
        self._last_action[active] = self._onehot[chosen[active]]
        return self._rules.orders(chosen, self._backend.units, self._medivac())

    def step(self, actions: np.ndarray, active: np.ndarray) -> StepResult:
        """Play `actions` [B, n] in the `active` slots [B]. Errors: as `orders`."""
        order, target, dest = self.orders(actions, active)
        self._backend.advance(order, target, dest, active)
        return self.finish_step(active)

    def _require_playable(self, actions: np.ndarray, active: np.ndarray) -> None:
        if np.logical_and(active, self.ended).any():
            raise ValueError(f"slots {np.flatnonzero(active & self.ended).tolist()} have ended: reset them first")
        require_available("battle", self.avail_actions(), actions, active)

    def finish_step(self, active: np.ndarray) -> StepResult:
        """Return the results of the step that the back-end has just played in the `active` slots [B]."""
        self._stale = True
        self.steps += active
        medivac = self._medivac() if self._heals else None
        ending = judge(self._backend.units, self._n, medivac, self.steps >= self._limit, self._any_medivacs)
        reward = self._ledger.step(self._backend.units, ending)
        dead = self._sizes - ending.left
        ending, reward, dead = ending.among(active), np.where(active, reward, 0.0), dead * active[:, None]
        self.ended |= ending.over
        return self._result(reward.astype(np.float32), ending.over, ending.won, ending.draw, ending.limit, dead.T)

    def _result(
        self,
        reward: np.ndarray,
        over: np.ndarray,
        won: np.ndarray,
        draw: np.ndarray,
        limit: np.ndarray,
        dead: np.ndarray,
    ) -> StepResult:
        """Count the battles that are `over` [B], and return a step's results. dead: [2, B], allies and enemies."""
        if np.count_nonzero(over):
            for name, flags in (("battles_won", won), ("battles_game", over), ("timeouts", limit)):
                self._counters[name] += int(np.count_nonzero(flags))
        return StepResult(
            reward=reward,
            terminated=over,
            truncated=limit if self._args.continuing_episode else np.zeros(len(reward), bool),
            info={
                "battle_won": won, "battle_draw": draw, "episode_limit": limit,
                "dead_allies": dead[0], "dead_enemies": dead[1],
            },
        )  # fmt: skip

    def drop(self, which: np.ndarray) -> None:
        """End the battles in the slots `which` [B] bool without a result; they are not counted."""
        self.ended |= which

    def observe(self, full: bool = False) -> Observation:
        """Return the current observations; the arrays are overwritten by the next call."""
        self._refresh()
        geometry, writer = self._geometry, self._writer
        writer.refresh(self._backend.units, geometry, self._within_reach, self._last_action, self.steps, self._sight)
        writer.write_obs(self._seen(), self._obs)
        if full:
            writer.write_obs(geometry.pair, self._full)
        if self._args.obs_instead_of_state:
            self._state[:] = self._obs.reshape(self._state.shape)
        else:
            writer.state(out=self._state)
        return Observation(self._obs, self._state, self._avail, self._full if full else None)

    def _seen(self) -> np.ndarray:
        """Return [B, n, U] bool: units shown in each agent's observation."""
        return self._geometry.pair & (self._geometry.place[0] < self._sight)

    def avail_actions(self) -> np.ndarray:
        """Return the current action mask [B, n, A] bool."""
        self._refresh()
        return self._avail

    def geometry(self) -> Geometry:
        """Return the current distances and directions."""
        self._refresh()
        return self._geometry

    def visibility(self) -> np.ndarray:
        """Return the visibility matrix [B, n, U] bool: living units nearer than the agent's sight range.

        As SMAC's `get_visibility_matrix`: between two allies the first one's sight range holds for both, and no agent
        sees itself.
        """
        geometry, n = self.geometry(), self._n
        near = geometry.pair & (geometry.place[0] < self._sight)
        ahead = np.triu(near[..., :n], 1)
        near[..., :n] = ahead | ahead.swapaxes(1, 2)
        return near

    def state_parts(self) -> dict[str, np.ndarray]:
        """Return copies of the state's parts by name (see `FeatureWriter.state_parts`)."""
        self.observe()
        return self._writer.state_parts()

    def frame(self, slot: int) -> Frame:
        """Return the units of a slot, for pictures."""
        units, spec, terrain = self._backend.units, self._spec, self._backend.terrain
        if self._walls is None:
            self._walls = walls_of(terrain.pathing, terrain.playable)
        n, kinds = self._n, [UNITS[i].name if i >= 0 else "" for i in units.type_id[slot].tolist()]
        turns = tuple(f"turn {i}" for i in range(self._args.variant.n_normal_actions - N_NORMAL_ACTIONS))
        sight, reach = self.ranges(slot)
        scene = Scene(
            ids=unit_names(n, spec.n_enemies),
            teams=(AGENTS,) * n + (OPPONENTS,) * spec.n_enemies,
            kinds=tuple(kinds),
            team_names=("agents", "enemies"),
            actions=("no-op", "stop", *COMPASS, *turns),
            health_max=tuple(rounded(units.health_max[slot])),
            shield_max=tuple(rounded(units.shield_max[slot])),
            heals=tuple(self._heals and kind == "medivac" for kind in kinds),
            sight=tuple(sight),
            reach=tuple(reach),
            bounds=tuple(float(edge) for edge in terrain.playable),  # type: ignore[arg-type]
            walls=self._walls,
        )
        alive, targets = units.alive[slot].tolist(), self._backend.targets(slot).tolist()
        x, y, health, shield = (rounded(each[slot]) for each in (units.x, units.y, units.health, units.shield))
        return Frame(scene, x, y, alive, health, shield, targets)

    def ranges(self, slot: int) -> tuple[list[float], list[float]]:
        """Return the sight and attack ranges of the agents of a slot, [n] each, cells."""
        return [self._spec.sight_range] * self._n, [SHOOT_RANGE] * self._n

    def type_bits(self) -> np.ndarray:
        """Return [B, n, unit_type_bits] float32, the agents' unit types."""
        return self._tables.ally_onehot.take(self._backend.units.type_id[:, : self._n], axis=0)

    def stats(self) -> dict[str, float]:
        """Return SMAC's counters; as there, `battles_draw` counts battles that reached the step limit."""
        games = self._counters["battles_game"]
        rate = self._counters["battles_won"] / games if games else 0.0
        return {**self._counters, "battles_draw": self._counters["timeouts"], "win_rate": rate, "restarts": 0}

    def snapshot(self) -> dict[str, Any]:
        """Return everything except the back-end's state."""
        return {
            "ledger": self._ledger.snapshot(),
            "last_action": self._last_action.copy(),
            "steps": self.steps.copy(),
            "ended": self.ended.copy(),
            "counters": dict(self._counters),
        }

    def restore(self, snapshot: dict[str, Any]) -> None:
        """Continue from a `snapshot`."""
        self._ledger.restore(snapshot["ledger"])
        self._last_action[:] = snapshot["last_action"]
        self.steps[:] = snapshot["steps"]
        self.ended[:] = snapshot["ended"]
        self._counters = dict(snapshot["counters"])
        self._stale = True

    def _medivac(self) -> np.ndarray:
        """Return [B, U] bool: medivacs on maps where they heal."""
        if not self._heals:
            return self._no_medivac
        return self._tables.medivac.take(self._backend.units.type_id)

    def _refresh(self) -> None:
        if self._stale:
            self._geometry.refresh(self._backend.units)
            self._fill_masks()
            self._stale = False

    def _fill_masks(self) -> None:
        self._rules.fill_mask(self._backend.units, self._medivac(), self._geometry, self._avail)


def walls_of(pathing: np.ndarray, playable: Sequence[float]) -> tuple[tuple[float, float, float, float], ...]:
    """Return the cells of `playable` (x0, y0, x1, y1) that cannot be walked on as rectangles.

    pathing: [map_x, map_y] bool. Columns with the same walls are joined.
    """
    x0, y0, x1, y1 = (round(edge) for edge in playable)
    found: list[tuple[float, float, float, float]] = []
    open_runs: dict[tuple[int, int], int] = {}  # (from, to) in y -> first column
    for x in range(x0, x1 + 1):
        blocked = ~pathing[x, y0:y1] if x < min(x1, len(pathing)) else np.zeros(y1 - y0, bool)
        edges = np.flatnonzero(np.diff(np.pad(blocked, 1).astype(np.int8))) + y0
        runs = set(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True))
        for run in sorted(open_runs.keys() - runs):
            found.append((open_runs.pop(run), run[0], x, run[1]))
        for run in runs - open_runs.keys():
            open_runs[run] = x
    return tuple(found)


class BattleEnv(BatchedEnv):
    """A batched environment with SMAC's semantics.

    Attributes:
        spec: the map. args: the flags of SMAC or SMACv2.
    """

    spec: MapSpec
    args: BattleArgs

    @abstractmethod
    def rules(self) -> BattleSemantics:
        """Return the semantics of the battles. Errors: ValueError before the first `reset` of the real game."""

    def observe(self, full: bool = False) -> Observation:
        """Return the current observations, with `full_obs` if `full`; of a lost battle the last ones."""
        return self.rules().observe(full)

    def frame(self, slot: int) -> Frame:
        """Return the units of a slot."""
        return self.rules().frame(slot)

    @abstractmethod
    def seed(self) -> int | None:
        """Return the current seed, None if there is none yet."""
