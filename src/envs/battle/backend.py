"""Interface between SMAC's semantics and the back-end that simulates the battle: the built-in simulator or the game.

Shapes: B slots, U = n allies + m enemies. Allies come first, sorted by (unit type, x, y) at the start of the episode
(`init_units` in oxwhirl/smac, starcraft2.py), then enemies in the game's order. Positions and distances are in map
cells, energy and health in game units.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum
from typing import Protocol

import numpy as np


class Order(IntEnum):
    """Order to a unit; NONE keeps the previous one (dead units, or an action that the game refuses)."""

    NONE = 0
    STOP = 1
    MOVE = 2
    ATTACK = 3
    HEAL = 4


@dataclass
class Units:
    """State of all units, arrays [B, U]; written by the back-end, read-only elsewhere.

    Attributes:
        x, y: position. health, health_max, shield, shield_max, energy: as in the game (float32).
        cooldown: game loops until the weapon is ready again (float32).
        type_id: index into the back-end's list of unit types, int16; -1 in unused columns.
        alive: health > 0.
        listed: the back-end still lists the unit; default: `alive`. The game may list a unit with health 0 for a
            while, and SMAC's `update_units` counts listed units to decide whether the battle has ended.
    """

    x: np.ndarray
    y: np.ndarray
    health: np.ndarray
    health_max: np.ndarray
    shield: np.ndarray
    shield_max: np.ndarray
    energy: np.ndarray
    cooldown: np.ndarray
    type_id: np.ndarray
    alive: np.ndarray
    listed: np.ndarray = field(default_factory=lambda: np.zeros(0, bool))

    def __post_init__(self) -> None:
        """Let a missing `listed` be `alive`."""
        if self.listed.size == 0:
            self.listed = self.alive


@dataclass(frozen=True)
class Terrain:
    """The map. `pathing` and `height` are indexed [x, y].

    Attributes:
        map_x, map_y: size of the map in cells. playable: (x0, y0, x1, y1).
        pathing: [map_x, map_y] bool. height: [map_x, map_y] float32 in [0, 1].
    """

    map_x: int
    map_y: int
    playable: tuple[float, float, float, float]
    pathing: np.ndarray
    height: np.ndarray


class BattleBackend(Protocol):
    """A batch of battles that takes orders for the allies; the back-end controls the enemies."""

    n_slots: int
    terrain: Terrain
    units: Units

    def reset(self, which: np.ndarray, seeds: np.ndarray) -> None:
        """Start new battles in slots `which` ([B] bool), slot b from `seeds[b]`."""

    def advance(self, order: np.ndarray, target: np.ndarray, dest: np.ndarray, active: np.ndarray) -> None:
        """Give orders to the allies of the active slots and play one agent step (8 game loops).

        order: [B, n] `Order`. target: [B, n] index in 0..U-1 for ATTACK and HEAL. dest: [B, n, 2] for MOVE.
        Always plays all loops, even if one side is dead.
        """

    def targets(self, slot: int) -> np.ndarray:
        """Return [U], the index of the unit that each unit of a slot attacks or heals; -1 for none or unknown."""
