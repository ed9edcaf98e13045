"""SMACv2's semantics: unit types and their ranges change from battle to battle, and agents may look one way only.

Follows oxwhirl/smacv2 (starcraft2.py) where that differs from SMAC: actions that turn the view, sight and reach by unit
type, which enemies are known (`EnemyVisibility`), own position and direction in the observation, allies that win when
the enemy has medivacs only, a reward that never pays for regenerating shields. Shapes as in `semantics`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from omagd.envs.battle.backend import BattleBackend, Order
from omagd.envs.battle.maps import MapSpec
from omagd.envs.battle.reward import Ending, judge
from omagd.envs.battle.semantics import BattleSemantics
from omagd.envs.battle.v2_args import SmacV2Args
from omagd.envs.battle.visibility import EnemyVisibility, Vision
from omagd.envs.protocol import StepResult


class V2Semantics(BattleSemantics):
    """`BattleSemantics` by SMACv2's rules. What an episode shows follows from its seed, however often one asks.

    Args:
        spec: the map. args: SMACv2's flags. backend: who simulates. unit_names: unit types in the order of their ids.
    """

    def __init__(self, spec: MapSpec, args: SmacV2Args, backend: BattleBackend, unit_names: Sequence[str]) -> None:
        super().__init__(spec, args, backend, unit_names, args.variant)
        sizes = backend.n_slots, spec.n_agents, spec.n_enemies
        self._vision = Vision(args, unit_names, *sizes[:2])
        self._sight, self._writer.direction = self._vision.sight, self._vision.direction
        self._ledger.keep_scale = not args.reward_scale_fix
        self._lookout = None if args.obs_order_fix else EnemyVisibility(args.prob_obs_enemy, *sizes)
        self._hides, self._masks_reach = not args.fully_observable, args.action_mask
        self._scripted = args.heuristic_ai  # the script turns nobody
        if not args.action_mask:
            self._within_reach = np.zeros_like(self._avail)
        self._shown = np.zeros((*sizes[:2], sum(sizes[1:])), bool)

    def begin(self, which: np.ndarray, seeds: np.ndarray | None = None) -> None:
        """Note that the back-end has started new battles in the slots `which` [B] bool, with `seeds` [B]."""
        super().begin(which)
        self._vision.begin(which, self._backend.units)
        if self._lookout is not None:
            self._lookout.begin(which, np.zeros(len(which), np.int64) if seeds is None else seeds)
            self._look(which)  # SMACv2's reset looks once by itself
        self._look(which)

    def orders(self, actions: np.ndarray, active: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Check `actions` [B, n] of the `active` slots and return (order, target, dest) for the back-end.

        Errors: ValueError for an action that is not available, or a slot whose episode is over.
        """
        order, target, dest = super().orders(actions, active)
        chosen = np.where(active[:, None], actions, 0)
        if not self._masks_reach:
            order[~np.take_along_axis(self._within_reach, chosen[..., None], -1)[..., 0]] = int(Order.NONE)
        if not self._scripted:
            self._vision.turn(chosen, active)
        return order, target, dest

    def settle(self, active: np.ndarray) -> StepResult:
        """Return what the step that the back-end has just played in the `active` slots [B] brought."""
        result = super().settle(active)
        if self._lookout is not None:
            self._lookout.bury(active, self._backend.units.alive)
        self._look(active)
        return result

    def _look(self, which: np.ndarray) -> None:
        """Let the agents of the slots `which` look around, once for each moment."""
        self._refresh()
        geometry, n = self._geometry, self._n
        in_sight = self._vision.in_sight(geometry)
        shown = geometry.pair & in_sight if self._hides else geometry.pair.copy()
        if self._lookout is not None:
            shown[..., n:] &= self._lookout.look(which, in_sight[..., n:], self._backend.units.alive[:, :n])
        self._shown[which] = shown[which]

    def _seen(self) -> np.ndarray:
        return self._shown

    def _judge(self) -> Ending:
        medivac = self._medivac() if self._heals else None
        return judge(self._backend.units, self._n, medivac, self.steps >= self._limit, any_medivacs=True)

    def _fill_masks(self) -> None:
        units, medivac, geometry = self._backend.units, self._medivac(), self._geometry
        self._rules.fill_mask(units, medivac, geometry, self._within_reach, self._vision.in_reach(geometry))
        if not self._masks_reach:
            self._rules.fill_mask(units, medivac, geometry, self._avail, geometry.pair)

    def snapshot(self) -> dict[str, Any]:
        """Return everything but the back-end's own state."""
        more = {name: getattr(self._vision, name).copy() for name in ("sight", "reach", "direction")}
        known = None if self._lookout is None else self._lookout.snapshot()
        return {**super().snapshot(), "vision": more, "lookout": known, "shown": self._shown.copy()}

    def restore(self, snapshot: dict[str, Any]) -> None:
        """Continue from a `snapshot`."""
        super().restore(snapshot)
        for name, values in snapshot["vision"].items():
            getattr(self._vision, name)[:] = values
        if self._lookout is not None:
            self._lookout.restore(snapshot["lookout"])
        self._shown[:] = snapshot["shown"]
