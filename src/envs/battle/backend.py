"""What SMAC's semantics need from whoever simulates the battle: the embedded simulator or the real game.

Shapes: B battle slots, U = n allies + m enemies. Allies stand first, sorted by (unit type, x, y) at the start of the
episode, then enemies in game order. Positions and distances are in map cells, energy and health in game units.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, Protocol

import numpy as np


class Order(IntEnum):
    """What a unit is told; NONE leaves the last order standing (SMAC: dead units, or a refused action)."""

    NONE = 0
    STOP = 1
    MOVE = 2
    ATTACK = 3
    HEAL = 4


@dataclass
class Units:
    """State of all units, arrays [B, U]; written by the back-end, read-only for everyone else.

    Attributes:
        x, y: position. health, health_max, shield, shield_max, energy: as in the game (float32).
        cooldown: game loops until the weapon is ready again (float32).
        type_id: index into the back-end's list of unit types, int16; -1 in unused columns.
        alive: health > 0.
        listed: the back-end still lists the unit. By default this is `alive` itself; the game may list a unit with
            health 0 for a while. SMAC counts listed units when it decides whether a battle has ended.
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
        """Let `listed` be `alive` where it was left out."""
        if self.listed.size == 0:
            self.listed = self.alive


@dataclass(frozen=True)
class Terrain:
    """The playing field. `pathing` and `height` are indexed [x, y].

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
    """A batch of battles that takes orders for the allies; the enemy is scripted by the back-end."""

    n_slots: int
    terrain: Terrain
    units: Units

    def reset(self, which: np.ndarray, seeds: np.ndarray) -> None:
        """Start new battles in slots `which` ([B] bool), slot b from `seeds[b]`."""

    def advance(self, order: np.ndarray, target: np.ndarray, dest: np.ndarray, active: np.ndarray) -> None:
        """Give orders to the allies of the active slots and play one agent step (8 game loops).

        order: [B, n] `Order`. target: [B, n] index in 0..U-1 for ATTACK and HEAL. dest: [B, n, 2] for MOVE.
        Stops nowhere early; what happens after the last unit of a side has died changes nothing.
        """

    def snapshot(self) -> dict[str, Any]:
        """Return everything that the future depends on."""

    def restore(self, snapshot: dict[str, Any]) -> None:
        """Continue from there."""

    def close(self) -> None:
        """Release processes and memory."""
