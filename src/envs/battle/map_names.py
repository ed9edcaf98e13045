"""Maps of `skirmish` from their names: armies that SMAC does not have, how far agents see, and where the enemy may be.

An army is a list of numbers and letters of one race: `m` marine, `M` marauder, `d` medivac; `c` colossus, `s` stalker,
`z` zealot; `h` hydralisk, `g` zergling. `<army>` fights its like, `<army>_vs_<army>` another one: `4m`, `9m_vs_10m`,
`2s4z`, `1c2s3z_vs_5z`. `3m_mixed_sight6` is `map_name=3m start=mixed sight_range=6`: results carry the whole name, so
runs on different kinds of battles are never compared by mistake.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

from omagd.envs.battle.maps import ARMY, FORMATION, HIDDEN, MAPS, MIXED, SIGHT_RANGE, TYPE_ORDER, MapSpec
from omagd.envs.task_sets.sets import NAMED
from omagd.utils.errors import UserError, unknown_name

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
