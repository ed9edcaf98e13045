"""What a battle hides from the agents: how far they see, and where the enemy may be.

A map's name can say both: `3m_mixed_sight6` is `map_name=3m start=mixed sight_range=6`. Results carry that name, so
runs on different kinds of battles are never compared by mistake.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

from omagd.envs.battle.generated_maps import skirmish_map
from omagd.envs.battle.maps import FORMATION, HIDDEN, MAPS, MIXED, SIGHT_RANGE, MapSpec
from omagd.utils.errors import UserError

NAME = re.compile(rf"(?P<map>.+?)(?:_(?P<start>{MIXED}|{HIDDEN}))?(?:_sight(?P<sight>\d+(?:\.\d+)?))?")

PRESETS = {
    "class a, constants of the map, which any policy learns": ("8m", "3m", "5m_vs_6m"),
    "class b, specific to the battle, inferable from what is seen": (
        "3m_mixed_sight6", "5m_mixed_sight6", "8m_mixed_sight6", "2s3z_mixed_sight6", "2s3z_mixed_sight4", "3s_vs_5z",
        "3s_vs_5z_sight5",
    ),
    "class c, specific to the battle, hardly inferable": ("3m_hidden", "5m_vs_6m_hidden"),
}  # fmt: skip
"""Maps by the class of what agents do not see (docs/beliefs.md); docs/skirmish.md has figures."""


def named_fog(values: dict[str, Any]) -> dict[str, Any]:
    """Return `env_args` whose map name says nothing about sight and start, but the keys do.

    Errors: UserError for a name and a key that contradict each other.
    """
    name = values.get("map_name")
    found = NAME.fullmatch(name) if isinstance(name, str) else None
    if found is None:
        return values
    said = {"start": found["start"], "sight_range": found["sight"] and float(found["sight"])}
    said = {key: value for key, value in said.items() if value}
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
