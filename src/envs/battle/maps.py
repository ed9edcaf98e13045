"""Maps: SMAC's by name, those of other packages, those of `skirmish` from their names, and the simulator's ground.

A name of `skirmish` says the armies, how far agents see, and where the enemy may be. An army is a list of numbers and
letters of one race: `m` marine, `M` marauder, `d` medivac; `c` colossus, `s` stalker, `z` zealot; `h` hydralisk, `g`
zergling. `<army>` fights its like, `<army>_vs_<army>` another one: `4m`, `9m_vs_10m`, `2s4z`, `1c2s3z_vs_5z`.
`3m_mixed_sight6` is `map_name=3m start=mixed sight_range=6`: results carry the whole name, so runs on different kinds
of battles are never compared by mistake.

Names, units, limits, races and map types follow oxwhirl/smac (maps/smac_maps.py, `map_param_registry`). Start positions
and terrain are the built-in simulator's own.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from importlib.metadata import EntryPoint
from typing import Any, Final, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from omagd.envs.battle.backend import Terrain
from omagd.envs.battle.units import ARMY, UNIT_ID, UNITS
from omagd.envs.task_sets import NAMED
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


NAME = re.compile(rf"(?P<map>.+?)(?:_(?P<start>{MIXED}|{HIDDEN}))?(?:_sight(?P<sight>\d+(?:\.\d+)?))?")


def named_fog(values: dict[str, Any]) -> dict[str, Any]:
    """Return `env_args` whose map name says nothing about sight and start, but the keys do.

    Errors: UserError for a name and a key that contradict each other.
    """
    name = values.get("map_name")
    found = NAME.fullmatch(name) if isinstance(name, str) else None
    if found is None:
        return values
    said = {"start": found["start"], "sight_range": found["sight"] and float(found["sight"])}
    said = {key: value for key, value in said.items() if value is not None}
    for key, value in said.items():
        usual = {"start": FORMATION, "sight_range": SIGHT_RANGE}[key]
        if (given := values.get(key, usual)) not in (usual, value):
            raise UserError(f"env_args.map_name={name}: says {key}={value}, not {given}. Leave out env_args.{key}")
    return {**values, **said, "map_name": found["map"]}


def spec_of(map_name: str, start: str, sight_range: float) -> MapSpec:
    """Return a map of `skirmish` with its start and the agents' sight, named after both.

    Errors: UserError for an unknown map, and for a random start on a map with a wall.
    """
    spec = skirmish_map(map_name)
    if start != FORMATION and spec.wall is not None:
        walled = " and ".join(name for name, each in MAPS.items() if each.wall is not None)
        raise UserError(
            f"env_args.start={start}: works on open maps, all but {walled}, whose wall stands between the teams. Use"
            f" start={FORMATION} with map_name={map_name}"
        )
    if (start, sight_range) == (FORMATION, SIGHT_RANGE):
        return spec
    name = spec.name + (f"_{start}" if start != FORMATION else "")
    name += f"_sight{sight_range:g}" if sight_range != SIGHT_RANGE else ""
    return replace(spec, name=name, start=start, sight_range=sight_range)


UNIT_OF = {
    "m": "marine", "M": "marauder", "d": "medivac", "c": "colossus", "s": "stalker", "z": "zealot", "h": "hydralisk",
    "g": "zergling",
}  # fmt: skip
RACES = {"T": "mMd", "P": "csz", "Z": "hg"}
MOST_UNITS = 64  # of a team; the largest team of SMAC's maps

# (largest team, steps): as long as SMAC's maps of that size (3m 60, 5m_vs_6m 70, 8m 120, 10m_vs_11m 150, 27m_vs_30m
# 180; 2s3z 120, 3s5z 150, 3s5z_vs_3s6z 170).
LIMITS = {"T": ((4, 60), (7, 70), (9, 120), (25, 150), (MOST_UNITS, 180)), "": ((5, 120), (8, 150), (MOST_UNITS, 180))}


def skirmish_map(name: str) -> MapSpec:
    """Return a map of `skirmish`: SMAC's of that name, or the one that the name describes. Errors: UserError."""
    found = MAPS.get(name) or generated_map(name)
    if found is None:
        known = unknown_name("env_args.map_name", name, [*NAMED, *MAPS]).message
        raise UserError(f"{known}; or armies, such as 4m, 9m_vs_10m, 2s4z; each also with a start and a sight, as in"
                        " 3m_mixed_sight6 or 8m_hidden")  # fmt: skip
    return found


def generated_map(name: str) -> MapSpec | None:
    """Return the map that `name` describes, None if it is no such name. Errors: UserError for impossible armies."""
    ours, separator, theirs = name.partition("_vs_")
    if not ARMY.fullmatch(ours) or (separator and not ARMY.fullmatch(theirs)):
        return None
    (race, allies), (enemy_race, enemies) = _army(name, ours), _army(name, theirs or ours)
    kind = _map_type(name, set(allies), set(enemies) if race == enemy_race else set())
    order = TYPE_ORDER[kind]
    if race != enemy_race and len(set(enemies)) > 1:  # SMAC's features number enemies by the types of the allies
        raise UserError(f"env_args.map_name={name}: enemies of another race must be of one type")
    marines = set(allies) | set(enemies) == {"marine"}
    size = max(len(allies), len(enemies))
    limit = next(steps for most, steps in LIMITS["T" if marines else ""] if size <= most)
    # Deep formations start further back, as on SMAC's large maps; both must fit on the map.
    apart = 8.5 if size > 20 else 7.0
    return MapSpec(
        name, tuple(sorted(allies, key=order.index)), enemies, limit, race, enemy_race,
        unit_type_bits=len(order) if len(order) > 1 else 0, map_type=kind, ally_start=((16.0 - apart, 16.0),),
        enemy_start=((16.0 + apart, 16.0),), spacing=1.25 if size <= 30 else 0.9,
    )  # fmt: skip


def _army(name: str, army: str) -> tuple[str, tuple[str, ...]]:
    """Return race and units of an army such as `3s5z`."""
    parts = [(int(count), letter) for count, letter in re.findall(r"(\d+)([a-zA-Z])", army)]
    race = next((race for race, letters in RACES.items() if all(letter in letters for _, letter in parts)), None)
    key = f"env_args.map_name={name}"
    if race is None:
        of_races = "; ".join(
            " ".join(f"{letter} {UNIT_OF[letter]}" for letter in letters) for letters in RACES.values()
        )
        raise UserError(f"{key}: {army} mixes races. An army has units of one race ({of_races})")
    units = tuple(UNIT_OF[letter] for count, letter in parts for _ in range(count))
    if len(units) > MOST_UNITS:
        raise UserError(f"{key}: {army} has {len(units)} units; at most {MOST_UNITS} fit")
    if set(units) == {"medivac"}:
        raise UserError(f"{key}: {army} cannot attack. Add units that can")
    return race, units


def _map_type(name: str, allies: set[str], enemies: set[str]) -> str:
    """Return the map type with the fewest unit types that tells the units apart.

    enemies: unit types of the enemies if they are of the same race. Two teams of one type each need no types, as on
    3s_vs_5z.
    """
    shown = allies if len(allies) == len(enemies) == 1 else allies | enemies
    kinds = {kind: order for kind, order in TYPE_ORDER.items() if shown <= set(order) and not kind.endswith("_gen")}
    if not kinds:
        raise UserError(f"env_args.map_name={name}: SMAC has no map type with {' and '.join(sorted(shown))} together")
    return min(kinds, key=lambda kind: len(kinds[kind]))


SIZE, BORDER = 32, 1  # cells; units cannot enter the border
FLAT_HEIGHT, HIGH_GROUND = 0.4, 0.9
LANE_MARGIN = 0.4  # distance kept from the sides of an opening


def build_terrain(spec: MapSpec) -> Terrain:
    """Return the terrain of a map: an open field with a border, divided by the map's wall if it has one."""
    low, high = BORDER, SIZE - BORDER
    pathing = np.zeros((SIZE, SIZE), dtype=bool)
    pathing[low:high, low:high] = True
    height = np.full((SIZE, SIZE), FLAT_HEIGHT, dtype=np.float32)
    if spec.wall is not None:
        if spec.wall.cliff:
            _raise_plateau(height, spec.wall)
        else:
            pathing &= ~_wall_cells(spec.wall)
    return Terrain(SIZE, SIZE, (low, low, high, high), pathing, height)


def ground_grid(spec: MapSpec, terrain: Terrain) -> np.ndarray:
    """Return [map_x, map_y] bool: where units that cannot walk cliffs may stand."""
    if spec.wall is None:
        return terrain.pathing
    return terrain.pathing & ~_wall_cells(spec.wall)


def _wall_cells(wall: Wall) -> np.ndarray:
    cell = np.arange(SIZE)
    across = (cell >= wall.x0) & (cell < wall.x1)
    closed = (cell < wall.gap_y0) | (cell >= wall.gap_y1)
    return across[:, None] & closed[None, :]


def _raise_plateau(height: np.ndarray, wall: Wall) -> None:
    """Raise everything left of a cliff, with a ramp in the opening."""
    height[: int(wall.x1)] = HIGH_GROUND
    ramp = np.linspace(HIGH_GROUND, FLAT_HEIGHT, int(wall.x1 - wall.x0) + 2, dtype=np.float32)[1:-1]
    height[int(wall.x0) : int(wall.x1), int(wall.gap_y0) : int(wall.gap_y1)] = ramp[:, None]


def lanes(wall: Wall) -> tuple[float, float, float, float, float]:
    """Return the middle of a wall, the lowest and highest y of the way through it, and its left and right face."""
    low, high = wall.gap_y0 + LANE_MARGIN, wall.gap_y1 - LANE_MARGIN
    return 0.5 * (wall.x0 + wall.x1), low, high, wall.x0 - LANE_MARGIN, wall.x1 + LANE_MARGIN
