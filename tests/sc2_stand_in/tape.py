"""Recorded battles: what the units did, played back instead of the simulator, independent of its physics.

A tape file (.npz) holds K battles of U units, n of them allies, with F = sum of (steps + 1) frames and S = sum of
steps: `steps` [K]; `frames` [F, 6, U] float32 (`DYNAMIC` features); `orders` [S] uint32, `order_digest` of what the
allies were ordered; `dead_orders` [S] uint32, the digest of the commands for dead allies, 0 where there are none;
`requests` [R, 3] uint32, all requests outside of battles in their order: battles begun before, place of the name in
`REQUESTS`, digest of the content (SMACv2 also draws where its agents look, which is left out); `maxima` [K, 2, U]
float32, largest health and shield; `pathing` [map_x, map_y] bool; `height` likewise, in 255ths; `playable` [4].
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from omagd.envs.battle.backend import Order, Terrain, Units

REQUESTS = ("create_game", "join_game", "game_info", "data", "observation", "step", "debug")
DYNAMIC = ("x", "y", "health", "shield", "energy", "cooldown")


def order_digest(order: np.ndarray, target: np.ndarray, dest: np.ndarray, alive: np.ndarray) -> int:
    """Return a number that stands for orders [n], [n], [n, 2] as far as they mean something to living units."""
    order = np.where(alive, order, Order.NONE)
    target = np.where(order >= Order.ATTACK, target, 0)
    dest = np.where((order == Order.MOVE)[:, None], dest, 0)
    return zlib.crc32(
        order.astype(np.int8).tobytes() + target.astype(np.int16).tobytes() + dest.astype(np.float32).tobytes()
    )


def request_digest(name: str, content: Any) -> int:
    """Return a number that stands for the content of a request; of an observation pysc2 spells defaults out."""
    return 0 if name == "observation" else zlib.crc32(content.SerializeToString(deterministic=True))


def frame_of(units: Units) -> np.ndarray:
    """Return [6, U], the changing part of slot 0 of `units`."""
    return np.stack([getattr(units, name)[0] for name in DYNAMIC]).astype(np.float32)


class TapeWriter:
    """Collects the battles of one game on the field `terrain`."""

    def __init__(self, terrain: Terrain) -> None:
        self._terrain = terrain
        self._steps: list[int] = []
        self._frames, self._maxima = [], []
        self._orders, self._dead_orders, self._requests = [], [], []

    def begin(self, units: Units) -> None:
        """Add the start of a battle."""
        self._steps.append(0)
        self._frames.append(frame_of(units))
        self._maxima.append(np.stack([units.health_max[0], units.shield_max[0]]))

    def asked(self, name: str, content: Any) -> None:
        """Add a request outside of battles."""
        self._requests.append((len(self._steps), REQUESTS.index(name), request_digest(name, content)))

    def played(self, digest: int, dead_digest: int, units: Units) -> None:
        """Add a step: digests of the orders and of the commands for dead allies, and what they led to."""
        self._steps[-1] += 1
        self._orders.append(digest)
        self._dead_orders.append(dead_digest)
        self._frames.append(frame_of(units))

    def save(self, path: Path) -> None:
        """Write the tape."""
        terrain = self._terrain
        np.savez(
            path, steps=np.array(self._steps, np.int32), frames=np.stack(self._frames), maxima=np.stack(self._maxima),
            orders=np.array(self._orders, np.uint32), dead_orders=np.array(self._dead_orders, np.uint32),
            requests=np.array(self._requests, np.uint32), pathing=terrain.pathing, playable=np.array(terrain.playable),
            height=np.rint(terrain.height.astype(np.float64) * 255).astype(np.uint8),
        )  # fmt: skip


class Tape:
    """A `BattleBackend` of one slot that plays a tape: every reset starts the next battle, whatever its seed.

    Args:
        path: the file. n_agents: n. type_ids: [U] indices into `units.UNITS`; to be written into `units` later if None.
        lingers: whether a unit that has died is listed for one more step.
    """

    n_slots = 1

    def __init__(self, path: Path, n_agents: int, type_ids: Sequence[int] | None = None, lingers: bool = False) -> None:
        with np.load(path) as data:
            steps, self._frames, self._orders = data["steps"], data["frames"], data["orders"]
            self._maxima, pathing = data["maxima"], data["pathing"]
            height = (data["height"] / 255).astype(np.float32)
            playable = tuple(float(v) for v in data["playable"])
        self.terrain = Terrain(*pathing.shape, playable, pathing, height)
        self._starts = np.concatenate([[0], np.cumsum(steps + 1)])
        self._n, self._battle, self._at = n_agents, -1, 0
        shape = (1, self._maxima.shape[2])
        kinds = np.full(shape, -1 if type_ids is None else type_ids, np.int16)
        self.units = Units(*np.zeros((8, *shape), np.float32), kinds, np.zeros(shape, bool))
        if lingers:
            self.units.listed = self.units.alive.copy()

    def _show(self) -> None:
        for name, values in zip(DYNAMIC, self._frames[self._at], strict=True):
            getattr(self.units, name)[0] = values
        before = self.units.alive.copy()
        np.greater(self.units.health, 0, out=self.units.alive)
        if self.units.listed is not self.units.alive:
            np.logical_or(self.units.alive, before, out=self.units.listed)

    def reset(self, which: np.ndarray, seeds: np.ndarray) -> None:
        """Start the next battle. Errors: ValueError after the last one."""
        self._battle += 1
        if self._battle >= len(self._starts) - 1:
            raise ValueError(f"the tape has {self._battle} battles only")
        self._at = self._starts[self._battle]
        self.units.health_max[0], self.units.shield_max[0] = self._maxima[self._battle]
        self.units.alive[0] = False
        self._show()

    def advance(self, order: np.ndarray, target: np.ndarray, dest: np.ndarray, active: np.ndarray) -> None:
        """Go on by one step. Errors: ValueError if the orders are not those of the tape, or it ends here."""
        digest = order_digest(order[0], target[0], dest[0], self.units.alive[0, : self._n])
        step = self._at - self._starts[self._battle]
        if self._at + 1 >= self._starts[self._battle + 1]:
            raise ValueError(f"battle {self._battle} of the tape ends after {step} steps")
        if digest != self._orders[self._at - self._battle]:
            raise ValueError(f"battle {self._battle}, step {step}: the orders are not those of the tape")
        self._at += 1
        self._show()

    def kill(self, columns: list[int]) -> None:
        """Let units die outside the tape."""
        self.units.health[0, columns] = 0
        self.units.alive[0, columns] = False
