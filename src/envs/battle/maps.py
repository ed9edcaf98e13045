"""SMAC's maps by name: who fights whom, for how long, on what ground; data only.

Names, limits, races and map types are those of oxwhirl/smac; the ground is this simulator's own.
"""

from __future__ import annotations

from dataclasses import dataclass

from omagd.envs.battle.units import UNIT_ID
from omagd.utils.errors import UserError, nearest

# SMAC numbers the unit types of a map type from 0 in this order; allies are sorted by it (not SMACv2's, `*_gen`).
TYPE_ORDER: dict[str, tuple[str, ...]] = {
    "marines": ("marine",),
    "stalkers": ("stalker",),
    "zealots": ("zealot",),
    "hydralisks": ("hydralisk",),
    "colossus": ("colossus",),
    "stalkers_and_zealots": ("stalker", "zealot"),
    "colossi_stalkers_zealots": ("colossus", "stalker", "zealot"),
    "MMM": ("marauder", "marine", "medivac"),
    "bane": ("baneling", "zergling"),
    "terran_gen": ("marine", "marauder", "medivac"),
    "protoss_gen": ("stalker", "zealot", "colossus"),
    "zerg_gen": ("zergling", "hydralisk", "baneling"),
}
HEALING = ("MMM", "terran_gen")  # map types whose medivacs heal


@dataclass(frozen=True)
class Wall:
    """A wall across the field from x0 to x1 with an opening from gap_y0 to gap_y1; a cliff lets cliff walkers pass."""

    x0: float
    x1: float
    gap_y0: float
    gap_y1: float
    cliff: bool = False


@dataclass(frozen=True)
class MapSpec:
    """One map.

    Attributes:
        allies, enemies: unit names in unit order (allies: SMAC's type order).
        limit: agent steps until the battle is given up. a_race, b_race: "T", "P" or "Z".
        unit_type_bits, map_type: as in SMAC.
        ally_start, enemy_start: centres of the starting formations; several centres share the side's units in turn.
        spacing, enemy_spacing: distance of neighbours in a formation; the enemy's is the same if 0.
        enemy_waits: the enemy stays at its start until it sees an ally, instead of advancing.
        size: the field is size x size cells, of which a border of `border` cells cannot be entered.
        wall: what divides the field, if anything does.
        file: the game's file of the map, without its ending; by default that of its name.
    """

    name: str
    allies: tuple[str, ...]
    enemies: tuple[str, ...]
    limit: int
    a_race: str
    b_race: str
    unit_type_bits: int
    map_type: str
    ally_start: tuple[tuple[float, float], ...] = ((9.0, 16.0),)
    enemy_start: tuple[tuple[float, float], ...] = ((23.0, 16.0),)
    spacing: float = 1.25
    enemy_spacing: float = 0.0
    enemy_waits: bool = False
    size: int = 32
    border: float = 1.0
    wall: Wall | None = None
    file: str = ""

    @property
    def game_file(self) -> str:
        """The game's file of the map, without its ending."""
        return self.file or self.name

    @property
    def n_agents(self) -> int:
        """Number of allies."""
        return len(self.allies)

    @property
    def n_enemies(self) -> int:
        """Number of enemies."""
        return len(self.enemies)

    @property
    def ally_types(self) -> tuple[str, ...]:
        """Unit names in SMAC's type order; a unit's SMAC type number is its place in this tuple."""
        return TYPE_ORDER[self.map_type]

    def unit_ids(self) -> tuple[int, ...]:
        """Return the `units.py` type of every unit column: allies, then enemies."""
        return tuple(UNIT_ID[name] for name in (*self.allies, *self.enemies))


def _team(**counts: int) -> tuple[str, ...]:
    return tuple(name for name, count in counts.items() for _ in range(count))


def _marines(name: str, allies: int, enemies: int, limit: int) -> MapSpec:
    apart = 8.5 if allies > 20 else 7.0  # deep formations start further back
    starts = ((16.0 - apart, 16.0),), ((16.0 + apart, 16.0),)
    return MapSpec(name, _team(marine=allies), _team(marine=enemies), limit, "T", "T", 0, "marines", *starts)


def _bio(name: str, enemies: tuple[str, ...], limit: int) -> MapSpec:
    return MapSpec(name, _team(marauder=2, marine=7, medivac=1), enemies, limit, "T", "T", 3, "MMM")


def _mixed(name: str, stalkers: int, zealots: int, enemy_zealots: int, limit: int) -> MapSpec:
    allies = _team(stalker=stalkers, zealot=zealots)
    enemies = _team(stalker=stalkers, zealot=enemy_zealots)
    return MapSpec(name, allies, enemies, limit, "P", "P", 2, "stalkers_and_zealots")


def _kiting(zealots: int, limit: int) -> MapSpec:
    name = f"3s_vs_{zealots}z"
    return MapSpec(name, _team(stalker=3), _team(zealot=zealots), limit, "P", "P", 0, "stalkers")


_ALL = (
    _marines("3m", 3, 3, 60),
    _marines("8m", 8, 8, 120),
    _marines("25m", 25, 25, 150),
    _marines("5m_vs_6m", 5, 6, 70),
    _marines("8m_vs_9m", 8, 9, 120),
    _marines("10m_vs_11m", 10, 11, 150),
    _marines("27m_vs_30m", 27, 30, 180),
    _bio("MMM", _team(marauder=2, marine=7, medivac=1), 150),
    _bio("MMM2", _team(marauder=3, marine=8, medivac=1), 180),
    _mixed("2s3z", 2, 3, 3, 120),
    _mixed("3s5z", 3, 5, 5, 150),
    _mixed("3s5z_vs_3s6z", 3, 5, 6, 170),
    _kiting(3, 150),
    _kiting(4, 200),
    _kiting(5, 250),
    MapSpec("1c3s5z", _team(colossus=1, stalker=3, zealot=5), _team(colossus=1, stalker=3, zealot=5), 180, "P", "P", 3,
            "colossi_stalkers_zealots", spacing=1.5),
    MapSpec("2m_vs_1z", _team(marine=2), _team(zealot=1), 150, "T", "P", 0, "marines"),
    MapSpec("corridor", _team(zealot=6), _team(zergling=24), 400, "P", "Z", 0, "zealots",
            ally_start=((8.0, 16.0),), enemy_start=((20.0, 16.0), (27.0, 16.0)), wall=Wall(14.0, 17.0, 14.0, 18.0)),
    MapSpec("6h_vs_8z", _team(hydralisk=6), _team(zealot=8), 150, "Z", "P", 0, "hydralisks"),
    MapSpec("2s_vs_1sc", _team(stalker=2), _team(spine_crawler=1), 300, "P", "Z", 0, "stalkers"),
    MapSpec("so_many_baneling", _team(zealot=7), _team(baneling=32), 100, "P", "Z", 0, "zealots",
            enemy_start=((19.5, 16.0),), spacing=0.8, enemy_spacing=1.0),
    MapSpec("bane_vs_bane", _team(baneling=4, zergling=20), _team(baneling=4, zergling=20), 200, "Z", "Z", 2, "bane",
            enemy_start=((22.0, 16.0),), spacing=0.9, enemy_spacing=2.0, enemy_waits=True),
    MapSpec("2c_vs_64zg", _team(colossus=2), _team(zergling=64), 400, "P", "Z", 0, "colossus", spacing=0.9,
            ally_start=((8.0, 16.0),), enemy_start=((26.0, 8.0), (26.0, 24.0)),
            wall=Wall(14.0, 16.0, 13.0, 19.0, cliff=True)),
)  # fmt: skip

MAPS: dict[str, MapSpec] = {spec.name: spec for spec in _ALL}


def get_map(name: str) -> MapSpec:
    """Return the map of that name. Errors: UserError with the nearest known name."""
    if name not in MAPS:
        raise UserError(f"env_args.map_name={name} is no known map.{nearest(name, MAPS)}", "known: " + " ".join(MAPS))
    return MAPS[name]
