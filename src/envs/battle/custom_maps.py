"""Maps of the game that other packages add by an entry point, in the form of SMAC's `map_param_registry`."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from omagd.envs.battle.maps import MAPS, TYPE_ORDER, MapSpec, get_map
from omagd.utils.errors import UserError, nearest

GROUP = "omagd.smac_maps"
MAP_TYPES = tuple(kind for kind in TYPE_ORDER if not kind.endswith("_gen"))  # the others are SMACv2's
FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
Race = Literal["T", "P", "Z", "R"]


class MapParams(BaseModel):
    """What SMAC's `map_param_registry` says of a map.

    Attributes:
        n_agents, n_enemies: numbers of units. limit: agent steps until a battle is given up.
        a_race, b_race: "T", "P", "Z" or "R"; of the allies and the enemies. Only "P" has shields.
        unit_type_bits: length of the one-hot unit type; 0 where one type is enough.
        map_type: which unit types the agents have, one of SMAC's.
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
        """Return the map; its units are placeholders, the game says what they are."""
        kind = TYPE_ORDER[self.map_type][:1]
        return MapSpec(
            name, kind * self.n_agents, kind * self.n_enemies, self.limit, self.a_race, self.b_race,
            self.unit_type_bits, self.map_type,
        )  # fmt: skip


def get_game_map(name: str) -> MapSpec:
    """Return the map of the game that has this name: one of SMAC's, else one that an installed package adds.

    Errors: UserError for a name that nobody has or two packages have, and for what is wrong with a package's entry.
    """
    if name in MAPS:
        return get_map(name)
    custom = list(_custom_maps())
    found = [(point, params) for point, key, params in custom if key == name]
    if not found:
        known = [*MAPS, *(key for _, key, _ in custom)]
        raise UserError(f"env_args.map_name={name} is no known map.{nearest(name, known)}", "known: " + " ".join(known))
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
    """Return whether another package adds a map of this name."""
    return name not in MAPS and any(key == name for _, key, _ in _custom_maps())


def _custom_maps() -> Iterator[tuple[EntryPoint, str, Any]]:
    """Yield (entry point, name, parameters) of the maps that installed packages add."""
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
