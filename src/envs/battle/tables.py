"""What SMAC's semantics know about unit types, as tables indexed by `Units.type_id`.

Source of the numbers: oxwhirl/smac, starcraft2.py (`unit_max_cooldown`, `get_unit_type_id`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from omagd.envs.battle.maps import MapSpec

MAX_COOLDOWN = {
    "marine": 15.0,
    "marauder": 25.0,
    "medivac": 200.0,  # full energy: its "cooldown" in the state is its energy
    "stalker": 35.0,
    "zealot": 22.0,
    "colossus": 24.0,
    "hydralisk": 10.0,
    "zergling": 11.0,
    "baneling": 1.0,
}
DEFAULT_MAX_COOLDOWN = 15.0

# The published code numbers the enemies' zealots and stalkers the other way round than the allies'.
ENEMY_TYPES: dict[str, tuple[str, ...]] = {"stalkers_and_zealots": ("zealot", "stalker")}


@dataclass(frozen=True)
class UnitTables:
    """Tables over type ids; the row after the last type stands for id -1 (unused column).

    Attributes:
        ally_onehot, enemy_onehot: [T + 1, unit_type_bits] float32.
        max_cooldown: [T + 1] float32, game loops (medivac: energy).
        medivac: [T + 1] bool.
    """

    ally_onehot: np.ndarray
    enemy_onehot: np.ndarray
    max_cooldown: np.ndarray
    medivac: np.ndarray

    @classmethod
    def build(cls, names: Sequence[str], spec: MapSpec) -> UnitTables:
        """Return the tables for the unit types `names` (in the order of their ids) on the map `spec`."""
        size = len(names) + 1
        cooldown = np.full(size, DEFAULT_MAX_COOLDOWN, np.float32)
        cooldown[:-1] = [MAX_COOLDOWN.get(name, DEFAULT_MAX_COOLDOWN) for name in names]
        medivac = np.zeros(size, bool)
        medivac[:-1] = [name == "medivac" for name in names]
        return cls(
            ally_onehot=_onehot(names, spec.ally_types, spec.unit_type_bits),
            enemy_onehot=_onehot(names, ENEMY_TYPES.get(spec.map_type, spec.ally_types), spec.unit_type_bits),
            max_cooldown=cooldown,
            medivac=medivac,
        )


def _onehot(names: Sequence[str], order: Sequence[str], bits: int) -> np.ndarray:
    table = np.zeros((len(names) + 1, bits), np.float32)
    if bits:
        for position, name in enumerate(order):
            table[names.index(name), position] = 1.0
    return table
