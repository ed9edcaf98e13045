"""SMAC's maps by name, and maps that other packages add by an entry point.

Names, units, limits, races and map types follow oxwhirl/smac (maps/smac_maps.py, `map_param_registry`). Start positions
and terrain are the embedded simulator's own.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from omagd.envs.battle.units import UNIT_ID
from omagd.utils.errors import UserError, nearest, unknown_name

# SMAC numbers the unit types of a map type from 0 in this order (`get_unit_type_id`), and sorts allies by it; not so in
# SMACv2 (`*_gen`).
TYPE_ORDER: dict[str, tuple[str, ...]] = {
    "marines": ("marine",), "stalkers": ("stalker",), "zealots": ("zealot",), "hydralisks": ("hydralisk",),
    "colossus": ("colossus",), "stalkers_and_zealots": ("stalker", "zealot"),
    "colossi_stalkers_zealots": ("colossus", "stalker", "zealot"), "MMM": ("marauder", "marine", "medivac"),
    "bane": ("baneling", "zergling"), "terran_gen": ("marine", "marauder", "medivac"),
    "protoss_gen": ("stalker", "zealot", "colossus"), "zerg_gen": ("zergling", "hydralisk", "baneling"),
}  # fmt: skip
HEALING = ("MMM", "terran_gen")  # map types whose medivacs heal


@dataclass(frozen=True)
class Wall:
    """A wall from x0 to x1 with an opening from gap_y0 to gap_y1; units that walk cliffs can cross a cliff."""

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
        limit: maximum number of agent steps. a_race, b_race: "T", "P" or "Z".
        unit_type_bits, map_type: as in SMAC.
        ally_start, enemy_start: centres of the start formations; units are assigned to the centres round-robin.
        spacing, enemy_spacing: distance of neighbours in a formation; 0: the enemy's is the same.
        enemy_waits: the enemy stays at its start until it sees an ally, instead of advancing.
        size: the map has size x size cells; a border of `border` cells cannot be entered.
        wall: divides the map, if any.
        file: the game's map file without its ending; default: `name`.
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
        """The game's map file without its ending."""
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
        raise unknown_name("env_args.map_name", name, MAPS)
    return MAPS[name]


GROUP = "omagd.smac_maps"
MAP_TYPES = tuple(kind for kind in TYPE_ORDER if not kind.endswith("_gen"))  # the others are SMACv2's
FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
Race = Literal["T", "P", "Z", "R"]


class MapParams(BaseModel):
    """Parameters of a map as in SMAC's `map_param_registry`.

    Attributes:
        n_agents, n_enemies: numbers of units. limit: maximum number of agent steps.
        a_race, b_race: races of allies and enemies, "T", "P", "Z" or "R". Only "P" has shields.
        unit_type_bits: length of the one-hot unit type; 0 for teams of one type.
        map_type: one of SMAC's map types; determines the unit types of the agents.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    n_agents: int = Field(ge=1)
    n_enemies: int = Field(ge=1)
    limit: int = Field(ge=1)
    a_race: Race
    b_race: Race
    unit_type_bits: int = Field(ge=0)
    map_type: str

    @model_validator(mode="after")
    def _check(self) -> MapParams:
        if self.map_type not in MAP_TYPES:
            hint = nearest(self.map_type, MAP_TYPES)
            raise ValueError(f"map_type={self.map_type} must be one of {' '.join(MAP_TYPES)}.{hint}")
        types = TYPE_ORDER[self.map_type]
        if 0 < self.unit_type_bits < len(types):
            raise ValueError(
                f"unit_type_bits={self.unit_type_bits} must be 0, or at least {len(types)} for the types of"
                f" map_type={self.map_type}: {' '.join(types)}"
            )
        return self

    def spec(self, name: str) -> MapSpec:
        """Return the map; its units are placeholders, the game determines them."""
        kind = TYPE_ORDER[self.map_type][:1]
        return MapSpec(
            name, kind * self.n_agents, kind * self.n_enemies, self.limit, self.a_race, self.b_race,
            self.unit_type_bits, self.map_type,
        )  # fmt: skip


def get_game_map(name: str) -> MapSpec:
    """Return a map of the game by name: SMAC's, or one that an installed package adds.

    Errors: UserError for an unknown name, a name that two packages add, or an invalid entry of a package.
    """
    if name in MAPS:
        return get_map(name)
    custom = list(_custom_maps())
    found = [(point, params) for point, key, params in custom if key == name]
    if not found:
        raise unknown_name("env_args.map_name", name, [*MAPS, *(key for _, key, _ in custom)])
    if len(found) > 1:
        who = " and ".join(f"{point.name}={point.value}" for point, _ in found)
        raise UserError(f"env_args.map_name={name}: {who} of {GROUP} both have this map; uninstall one of them")
    point, params = found[0]
    try:
        return MapParams.model_validate(params).spec(name)
    except ValidationError as error:
        first = error.errors()[0]
        key = "".join(f".{part}" for part in first["loc"])
        what = first["msg"].removeprefix("Value error, ")
        raise UserError(f"{_origin(point)}: map {name}{key}: {what} (docs/sc2.md)") from None


def is_custom(name: str) -> bool:
    """Return whether another package adds this map."""
    return name not in MAPS and any(key == name for _, key, _ in _custom_maps())


def _custom_maps() -> Iterator[tuple[EntryPoint, str, Any]]:
    """Yield (entry point, name, parameters) of each map that installed packages add."""
    for point in entry_points(group=GROUP):
        try:
            registry = point.load()
        except (ImportError, AttributeError) as error:
            raise UserError(f"{_origin(point)}: cannot be loaded ({error}); fix or uninstall that package") from None
        if not isinstance(registry, Mapping):
            raise UserError(f"{_origin(point)}: must be a dict of maps by name, not a {type(registry).__name__}")
        for name, params in registry.items():
            if not isinstance(name, str) or not FILE_NAME.fullmatch(name):
                raise UserError(f"{_origin(point)}: {name!r} must be the name of a map file, without folder and ending")
            yield point, name, params


def _origin(point: EntryPoint) -> str:
    return f"entry point {point.name}={point.value} of {GROUP}"
