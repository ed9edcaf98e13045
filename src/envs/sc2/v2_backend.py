"""`BattleBackend` with the real game as in SMACv2: random teams are created on an empty map."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from omagd.envs.battle.args import SmacV2Args
from omagd.envs.battle.lineups import Lineup, draw_lineup
from omagd.envs.battle.maps import MapSpec
from omagd.envs.battle.units import UNIT_ID
from omagd.envs.sc2.backend import ALLY, ENEMY, PATIENCE, GameBackend, UnitsMissing
from omagd.envs.sc2.client import sc_pb
from omagd.envs.sc2.game import GameLost
from omagd.envs.sc2.install import GAME_TYPES

# The map's own unit types, which the agents control, are the game's last ones, in this order.
OWN_TYPES = (
    "baneling", "colossus", "hydralisk", "marauder", "marine", "medivac", "stalker", "zealot", "zergling",
)  # fmt: skip
DRAWS = 5
_ENEMY_TYPES = {name: number for number, name in GAME_TYPES.items()}


class V2Backend(GameBackend):
    """`GameBackend` that creates the units of each battle; teams and positions follow from the reset seed."""

    def __init__(self, spec: MapSpec, args: SmacV2Args) -> None:
        super().__init__(spec, args)
        self._config = args.capability_config

    def _begin(self, seed: int) -> None:
        """Start the game or remove its units, then create new ones. Errors: GameLost."""
        if self.game is None:
            self._launch(seed)
            known = self._game.ask(data=sc_pb.RequestData(ability_id=True, unit_type_id=True)).units
            first = len(known) - len(OWN_TYPES)
            self._ally_ids = {first + i: UNIT_ID[name] for i, name in enumerate(OWN_TYPES)}
        else:
            self._clear()
        for attempt in range(DRAWS):
            try:
                self._create(draw_lineup(self._config, seed, attempt))
                self._enlist()
                return
            except UnitsMissing as error:  # as in SMACv2: at some positions the game creates no unit
                reason = error
                self._clear()
        raise GameLost(str(reason))

    def _clear(self) -> None:
        """Kill all units and wait until they are gone. Errors: GameLost."""
        for _ in range(PATIENCE):
            tags = [unit.tag for unit in self._listed(self._game.exchange(self._look))]
            if not tags:
                return
            self._kill(tags)
        raise GameLost(f"{len(tags)} units would not die")

    def _create(self, lineup: Lineup) -> None:
        own = dict(zip(OWN_TYPES, self._ally_ids, strict=True))
        self._create_team(ALLY, [own[name] for name in lineup.allies], lineup.ally_places)
        self._create_team(ENEMY, [_ENEMY_TYPES[name] for name in lineup.enemies], lineup.enemy_places)
        self._game.ask(step=sc_pb.RequestStep(count=1))

    def _create_team(self, owner: int, kinds: Sequence[int], places: np.ndarray) -> None:
        request = sc_pb.RequestDebug()
        for kind, (x, y) in zip(kinds, places.tolist(), strict=True):
            unit = request.debug.add().create_unit
            unit.unit_type, unit.owner, unit.quantity = kind, owner, 1
            unit.pos.x, unit.pos.y = x, y
        self._game.ask(debug=request)
