"""SMAC's maps by name, and maps that other packages add by an entry point.

Names, units, limits, races and map types follow oxwhirl/smac (maps/smac_maps.py, `map_param_registry`). Start positions
and terrain are the built-in simulator's own.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import EntryPoint
from typing import Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from omagd.envs.battle.units import UNIT_ID, UNITS
from omagd.utils.errors import UserError, nearest, unknown_name
from omagd.utils.registry import installed

# SMAC numbers the unit types of a map type from 0 in this order (`get_unit_type_id`), and sorts allies by it; not so in
# SMACv2 (`*_gen`).
TYPE_ORDER: dict[str, tuple[str, ...]] = {
    "marines": ("marine",), "stalkers": ("stalker",), "zealots": ("zealot",), "hydralisks": ("hydralisk",),
    "colossus": ("colossus",), "stalkers_and_zealots": ("stalker", "zealot"),
    "colossi_stalkers_zealots": ("colossus", "stalker", "zealot"), "MMM": ("marauder", "marine", "medivac"),
    "bane": ("baneling", "zergling"), "terran_gen": ("marine", "marauder", "medivac"),
    "protoss_gen": ("stalker", "zealot", "colossus"), "zerg_gen": ("zergling", "hydralisk", "baneling"),
}  # fmt: skip
# How battles of the built-in simulator start (`starts`).
FORMATION: Final = "formation"
MIXED: Final = "mixed"
HIDDEN: Final = "hidden"
SIGHT_RANGE = 9.0  # cells; SMAC's

ARMY = re.compile(r"(?:[1-9]\d{0,2}[mMdcszhg])+")
"""An army in the name of a map: numbers, each with the letter of a unit."""
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
        wall: divides the map, if any.
        file: the game's map file without its ending; default: `name`.
        start: where the teams of the built-in simulator stand: FORMATION, MIXED or HIDDEN.
        sight_range: how far agents see, in cells.
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
    wall: Wall | None = None
    file: str = ""
    start: str = FORMATION
    sight_range: float = SIGHT_RANGE

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


_MAP_TYPE = {frozenset(units): kind for kind, units in TYPE_ORDER.items() if not kind.endswith("_gen")}


def _team(units: str) -> tuple[str, ...]:
    """Return the units of a team like "7 marine 1 medivac"."""
    words = units.split()
    return tuple(kind for count, kind in zip(words[::2], words[1::2], strict=True) for _ in range(int(count)))


def _map(name: str, limit: int, units: str, enemy_units: str = "", **keys: Any) -> MapSpec:
    """Return the map of two teams; by default they are equal."""
    allies, enemies = _team(units), _team(enemy_units or units)
    a_race, b_race = (UNITS[UNIT_ID[team[0]]].race for team in (allies, enemies))
    kinds = frozenset(allies)
    bits = len(kinds) if len(kinds) > 1 else 0
    return MapSpec(name, allies, enemies, limit, a_race, b_race, bits, _MAP_TYPE[kinds], **keys)


_BACK: Any = {"ally_start": ((7.5, 16.0),), "enemy_start": ((24.5, 16.0),)}  # deep formations start further back
_BIO, _ZEALOTS = "2 marauder 7 marine 1 medivac", "3 stalker 5 zealot"
_ALL = (
    _map("3m", 60, "3 marine"),
    _map("8m", 120, "8 marine"),
    _map("25m", 150, "25 marine", **_BACK),
    _map("5m_vs_6m", 70, "5 marine", "6 marine"),
    _map("8m_vs_9m", 120, "8 marine", "9 marine"),
    _map("10m_vs_11m", 150, "10 marine", "11 marine"),
    _map("27m_vs_30m", 180, "27 marine", "30 marine", **_BACK),
    _map("MMM", 150, _BIO),
    _map("MMM2", 180, _BIO, "3 marauder 8 marine 1 medivac"),
    _map("2s3z", 120, "2 stalker 3 zealot"),
    _map("3s5z", 150, _ZEALOTS),
    _map("3s5z_vs_3s6z", 170, _ZEALOTS, "3 stalker 6 zealot"),
    _map("3s_vs_3z", 150, "3 stalker", "3 zealot"),
    _map("3s_vs_4z", 200, "3 stalker", "4 zealot"),
    _map("3s_vs_5z", 250, "3 stalker", "5 zealot"),
    _map("1c3s5z", 180, "1 colossus 3 stalker 5 zealot", spacing=1.5),
    _map("2m_vs_1z", 150, "2 marine", "1 zealot"),
    _map("corridor", 400, "6 zealot", "24 zergling", ally_start=((8.0, 16.0),), wall=Wall(14.0, 17.0, 14.0, 18.0),
         enemy_start=((20.0, 16.0), (27.0, 16.0))),
    _map("6h_vs_8z", 150, "6 hydralisk", "8 zealot"),
    _map("2s_vs_1sc", 300, "2 stalker", "1 spine_crawler"),
    _map("so_many_baneling", 100, "7 zealot", "32 baneling", enemy_start=((19.5, 16.0),), spacing=0.8,
         enemy_spacing=1.0),
    _map("bane_vs_bane", 200, "4 baneling 20 zergling", enemy_start=((22.0, 16.0),), spacing=0.9, enemy_spacing=2.0,
         enemy_waits=True),
    _map("2c_vs_64zg", 400, "2 colossus", "64 zergling", ally_start=((8.0, 16.0),), spacing=0.9,
         enemy_start=((26.0, 8.0), (26.0, 24.0)), wall=Wall(14.0, 16.0, 13.0, 19.0, cliff=True)),
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
    for point in installed(GROUP):
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
