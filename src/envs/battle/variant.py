"""In what observations, state and actions of SMACv2 differ from SMAC's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from omagd.envs.battle.actions import N_NORMAL_ACTIONS
from omagd.envs.battle.maps import HEALING, MapSpec

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


@dataclass(frozen=True)
class Variant:
    """What stands where; the defaults are SMAC's.

    Attributes:
        n_turns: actions that turn the agent's view; they stand between the moves and the attacks.
        own_place: agents see where on the map they stand.
        direction: agents see which way they look, and the state shows it of all of them.
        ally_types: agents see the types of their allies; the places for them are there in any case.
        padded_time: the elapsed time is preceded by a feature that is always zero (see `features.entity_layout`).
    """

    n_turns: int = 0
    own_place: bool = False
    direction: bool = False
    ally_types: bool = True
    padded_time: bool = True

    @property
    def n_normal_actions(self) -> int:
        """Number of actions that aim at nobody."""
        return N_NORMAL_ACTIONS + self.n_turns

    def n_actions(self, spec: MapSpec) -> int:
        """Return A: those that aim at nobody, one for each enemy or, if medivacs have more allies to heal, ally."""
        return self.n_normal_actions + n_targets(spec)


def n_targets(spec: MapSpec) -> int:
    """Return how many actions aim at somebody."""
    return max(spec.n_enemies, spec.n_agents) if spec.map_type in HEALING else spec.n_enemies


SMAC = Variant()
