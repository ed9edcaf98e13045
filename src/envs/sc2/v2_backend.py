"""`BattleBackend` with the real game as in SMACv2: random teams are created on an empty map.

Source of the distributions: oxwhirl/smacv2, distributions.py (`weighted_teams`, `surrounded`, `reflect_position`,
`surrounded_and_reflect`). Positions are in cells.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from omagd.envs.battle.args import BUFFER, MOST_GROUPS, OFFSET, CapabilityArgs, SmacV2Args, StartArgs, TeamArgs
from omagd.envs.battle.maps import MapSpec
from omagd.envs.battle.units import UNIT_ID
from omagd.envs.sc2.backend import ALLY, ENEMY, PATIENCE, GameBackend, UnitsMissing
from omagd.envs.sc2.client import sc_pb
from omagd.envs.sc2.game import GameLost
from omagd.envs.sc2.install import GAME_TYPES
from omagd.utils.seeding import generator

ALLY_PLACE, ENEMY_PLACE = (8.0, 16.0), (24.0, 16.0)  # without random start positions


@dataclass(frozen=True)
class Lineup:
    """Teams and start positions of a battle.

    Attributes:
        allies, enemies: names of unit types.
        ally_places: [n, 2] float64. enemy_places: [m, 2] float64.
    """

    allies: tuple[str, ...]
    enemies: tuple[str, ...]
    ally_places: np.ndarray
    enemy_places: np.ndarray


def draw_lineup(config: CapabilityArgs, seed: int, attempt: int = 0) -> Lineup:
    """Return the lineup that follows from `seed` and `attempt`."""
    n, m, rng = config.n_units, config.enemies, generator(seed, "lineup", attempt)
    allies = _team(config.team_gen, n, rng)
    enemies = allies[:m] + (_team(config.team_gen, m - n, rng) if m > n else ())
    places = np.tile(ALLY_PLACE, (n, 1)), np.tile(ENEMY_PLACE, (m, 1))
    start = config.start_positions
    if start is not None:
        surrounds = start.dist_type == "surrounded"
        if start.dist_type == "surrounded_and_reflect":
            surrounds = rng.random() > start.p
        places = (_surrounded if surrounds else _reflected)(start, n, m, rng)
    return Lineup(allies, enemies, *places)


def _team(config: TeamArgs, size: int, rng: np.random.Generator) -> tuple[str, ...]:
    """Draw all units by their weights; repeat while the team has exception types only."""
    while True:
        team = rng.choice(config.unit_types, size=size, p=config.weights).tolist()
        if any(kind not in config.exception_unit_types for kind in team):
            return tuple(team)


def _surrounded(start: StartArgs, n: int, m: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Place allies in the middle and enemies in one to four groups, each at a random point of its own diagonal."""
    size = np.array([start.map_x, start.map_y], float)
    groups = int(rng.integers(1, MOST_GROUPS + 1))
    members = rng.multinomial(m, np.full(groups, 1 / groups))
    nearness = rng.random((groups, 1))
    corners = np.array([(0, 0), (0, 1), (1, 1), (1, 0)])[rng.choice(4, groups, replace=False)]
    inner = size / 2 + np.where(corners == 1, OFFSET, -OFFSET)
    places = inner * nearness + corners * size * (1 - nearness)
    return np.tile(size / 2, (n, 1)), places.repeat(members, axis=0)


def _reflected(start: StartArgs, n: int, m: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Place allies randomly in the left half, enemies mirrored, and further enemies randomly in the right half."""
    half, top = start.map_x / 2, start.map_y
    allies = rng.uniform((0, 0), (half - BUFFER, top), (n, 2))
    enemies = np.stack([start.map_x - allies[:m, 0], allies[:m, 1]], axis=1)
    more = rng.uniform((half, 0), (start.map_x, top), (max(m - n, 0), 2))
    return allies, np.concatenate([enemies, more])


# The map's own unit types, which the agents control, are the game's last ones, in this order.
OWN_TYPES = (
    "baneling", "colossus", "hydralisk", "marauder", "marine", "medivac", "stalker", "zealot", "zergling",
)  # fmt: skip
DRAWS = 5
_ENEMY_TYPES = {name: number for number, name in GAME_TYPES.items()}


class V2Backend(GameBackend):
    """`GameBackend` that creates the units of each battle; teams and positions follow from the reset seed.

    Args:
        spec: the map. args: version, difficulty, step_mul, seed and timeout of the game, and the distributions.
    """

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
