"""Unit types of SMAC's maps; data only.

Speeds are cells per second and cooldowns seconds at the game speed "faster" (22.4 loops per second). Health, shields,
armour, damage, cooldowns, ranges and speeds come from this project's specification; radii, attributes, melee reach,
splash shapes, energy regeneration and the medivac's rates are commonly quoted figures. None has been checked against
the game's data. Numbers that differ between versions of the game are marked as such.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

LOOPS_PER_SECOND = 22.4
SHIELD_REGEN_DELAY = 10.0  # seconds without damage
SHIELD_REGEN = 2.0  # per second
ZERG_REGEN = 0.38  # per second
MIN_DAMAGE = 0.5  # what armour leaves of a hit at least

ARMY = re.compile(r"(?:[1-9]\d{0,2}[mMdcszhg])+")
"""An army in the name of a map: numbers, each with the letter of a unit."""


@dataclass(frozen=True)
class UnitSpec:
    """One unit type. Lengths in cells, times in seconds, ranges from edge to edge.

    Attributes:
        race: "T", "P" or "Z".
        damage, attacks: damage of one hit and hits per shot. bonus, bonus_to: extra damage against "light"/"armored".
        cooldown: seconds between shots; 0 for units without a weapon.
        attributes: "light", "armored", "biological", "structure", ...
        hits_air: whether the weapon reaches flying units. air: whether the unit flies.
        heal, heal_cost, heal_range: health per second, energy per health point, reach; heal is 0 for non-healers.
        splash_radius: all enemies this near to the impact are hit, too. splash_line: half the length of the strip
            across the line of fire that is hit, too. Zero: none.
        explodes: attacks by exploding, and explodes when killed.
        walks_cliffs: crosses cliffs that stop other ground units.
    """

    name: str
    race: str
    health: float
    shield: float = 0.0
    armor: float = 0.0
    damage: float = 0.0
    attacks: int = 1
    bonus: float = 0.0
    bonus_to: str = ""
    cooldown: float = 0.0
    range: float = 0.0
    speed: float = 0.0
    radius: float = 0.5
    attributes: tuple[str, ...] = ()
    air: bool = False
    hits_air: bool = False
    energy: float = 0.0
    energy_max: float = 0.0
    energy_regen: float = 0.0
    heal: float = 0.0
    heal_cost: float = 0.0
    heal_range: float = 0.0
    splash_radius: float = 0.0
    splash_line: float = 0.0
    explodes: bool = False
    walks_cliffs: bool = False

    @property
    def is_healer(self) -> bool:
        """Whether the unit heals instead of attacking."""
        return self.heal > 0


UNITS: tuple[UnitSpec, ...] = (
    UnitSpec("marine", "T", health=45, damage=6, cooldown=0.61, range=5, speed=3.15, radius=0.375, hits_air=True,
             attributes=("light", "biological")),
    UnitSpec("marauder", "T", health=125, armor=1, damage=10, bonus=10, bonus_to="armored", cooldown=1.07, range=6,
             speed=3.15, radius=0.5625, attributes=("armored", "biological")),
    UnitSpec("medivac", "T", health=150, armor=1, speed=3.5, radius=0.75, air=True, energy=50, energy_max=200,
             heal_range=4, attributes=("armored", "mechanical"),
             heal=12.6, heal_cost=1.0 / 3.0, energy_regen=0.7875),  # depends on the version; per hp and per second
    UnitSpec("stalker", "P", health=80, shield=80, armor=1, damage=13, bonus=5, bonus_to="armored", cooldown=1.34,
             range=6, speed=4.13, radius=0.625, hits_air=True, attributes=("armored", "mechanical")),
    UnitSpec("zealot", "P", health=100, shield=50, armor=1, damage=8, attacks=2, cooldown=0.86, range=0.1, speed=3.15,
             radius=0.5, attributes=("light", "biological")),
    UnitSpec("colossus", "P", health=200, shield=150, armor=1, damage=10, attacks=2, bonus=5, bonus_to="light",
             cooldown=1.07, range=7, speed=3.15, radius=1.0, splash_line=1.4, walks_cliffs=True,
             attributes=("armored", "mechanical", "massive")),
    UnitSpec("zergling", "Z", health=35, damage=5, cooldown=0.497, range=0.1, speed=4.13, radius=0.375,
             attributes=("light", "biological")),
    UnitSpec("baneling", "Z", health=30, damage=20, bonus=15, bonus_to="light", cooldown=0.59, range=0.25, speed=3.5,
             radius=0.375, splash_radius=2.2, explodes=True, attributes=("biological",)),
    UnitSpec("spine_crawler", "Z", health=300, armor=2, damage=25, bonus=5, bonus_to="armored", cooldown=1.32, range=7,
             radius=0.9, attributes=("armored", "biological", "structure")),
    UnitSpec("hydralisk", "Z", cooldown=0.59, range=5, speed=3.15, radius=0.625, hits_air=True,
             attributes=("light", "biological"), health=80.0, damage=12.0),  # depends on the version
)  # fmt: skip

UNIT_ID: dict[str, int] = {unit.name: index for index, unit in enumerate(UNITS)}


def hit_damage(attacker: UnitSpec, target: UnitSpec) -> tuple[float, float]:
    """Return the damage of one shot to the target's shield and to its health (armour protects only health)."""
    hit = attacker.damage + (attacker.bonus if attacker.bonus_to in target.attributes else 0.0)
    if attacker.cooldown == 0 or (target.air and not attacker.hits_air):
        return 0.0, 0.0
    return attacker.attacks * hit, attacker.attacks * max(hit - target.armor, MIN_DAMAGE)
