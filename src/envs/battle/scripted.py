"""Scripted policies for the allies: baselines for learning, and data collection.

They read the true positions of all units but obey the action mask. Shapes: B slots, n agents, m enemies, A actions;
results are [B, n] int64.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from omagd.envs.battle.actions import EAST, NORTH, SOUTH, STOP, WEST, Geometry
from omagd.envs.battle.args import N_NORMAL_ACTIONS
from omagd.envs.battle.backend import Units
from omagd.envs.battle.units import LOOPS_PER_SECOND, UNITS, hit_damage

FAR = 1e6
HEALER_DISTANCE = 3.0  # healers follow to this distance
LOOPS_PER_STEP = 8
CAUTION = 3  # kiting units stay so many enemy steps outside of its reach
OWN_RADIUS = 0.5

# Tables over type ids; the last row stands for id -1 (unused column).
CAN_HURT = np.zeros((len(UNITS) + 1, len(UNITS) + 1), bool)
CAN_HURT[:-1, :-1] = [[hit_damage(a, b)[1] > 0 for b in UNITS] for a in UNITS]
REACH = np.array([*(u.range + u.radius for u in UNITS), 0.0])
SPEED = np.array([*(u.speed for u in UNITS), 0.0])
HEALER = np.array([*(u.is_healer for u in UNITS), False])


@dataclass(frozen=True)
class Scene:
    """Input of the scripts: the units, their geometry and the mask [B, n, A]."""

    units: Units
    geometry: Geometry
    avail: np.ndarray

    @property
    def n_agents(self) -> int:
        """Number of allies."""
        return self.avail.shape[1]


def choose(policy: str, scene: Scene) -> np.ndarray:
    """Return the actions [B, n] of `policy`, one of `POLICIES` but "random"; dead agents take the no-op."""
    script = {"attack_nearest": attack_nearest, "focus_fire": focus_fire, "kiting": kiting}[policy]
    return np.where(scene.units.alive[:, : scene.n_agents], script(scene), 0)


def attack_nearest(scene: Scene) -> np.ndarray:
    """Attack the nearest enemy in reach, else walk towards the nearest; healers heal the nearest hurt ally."""
    return _fight(scene, scene.geometry.enemy_dist)


def focus_fire(scene: Scene) -> np.ndarray:
    """Attack the weakest enemy in the weapon's reach, of equals the one most allies can attack; else the nearest."""
    units, distance, n = scene.units, scene.geometry.enemy_dist, scene.n_agents
    points = (units.health + units.shield)[:, None, n:].astype(np.float64)
    attackers = _targets(scene).sum(axis=1, keepdims=True)
    near = distance <= REACH[units.type_id[:, :n, None]] + OWN_RADIUS
    return _fight(scene, np.where(near, points - 0.01 * attackers, FAR + distance))


def kiting(scene: Scene) -> np.ndarray:
    """Step back from a shorter-ranged enemy that is close while the weapon is not ready; else attack the nearest."""
    units, geometry, n = scene.units, scene.geometry, scene.n_agents
    distance = np.where(geometry.enemy_pair, geometry.enemy_dist, FAR)
    nearest = np.argmin(distance, axis=-1)
    kind, enemy_kind = units.type_id[:, :n], np.take_along_axis(units.type_id[:, n:], nearest, axis=1)
    gap = _pick(distance, nearest)
    threat = REACH[enemy_kind] + OWN_RADIUS + CAUTION * SPEED[enemy_kind] * LOOPS_PER_STEP / LOOPS_PER_SECOND
    retreat = (units.cooldown[:, :n] > 0) & (REACH[kind] > REACH[enemy_kind] + 1.0) & (gap < threat)
    away, free = _walk(scene, -_pick(geometry.enemy_dx, nearest), -_pick(geometry.enemy_dy, nearest))
    return np.where(retreat & free & ~HEALER[kind], away, attack_nearest(scene))


def _fight(scene: Scene, score: np.ndarray) -> np.ndarray:
    """Attack the target of lowest `score` [B, n, m] in reach, else walk towards the nearest enemy."""
    geometry = scene.geometry
    hurtable = _hurtable(scene) & geometry.enemy_pair
    target, reachable = _lowest(score, _targets(scene))
    goal, _ = _lowest(geometry.enemy_dist, hurtable)
    walk, _ = _walk(scene, _pick(geometry.enemy_dx, goal), _pick(geometry.enemy_dy, goal))
    actions = np.where(reachable, N_NORMAL_ACTIONS + target, np.where(hurtable.any(axis=-1), walk, STOP))
    healer = HEALER[scene.units.type_id[:, : scene.n_agents]]
    return np.where(healer, _heal(scene), actions) if healer.any() else actions


def _heal(scene: Scene) -> np.ndarray:
    """Heal the nearest hurt ally in reach, else follow the nearest ally, preferably a hurt one."""
    units, geometry, n = scene.units, scene.geometry, scene.n_agents
    hurt = units.health[:, None, :n] < units.health_max[:, None, :n]
    fighter = geometry.pair[..., :n] & ~np.eye(n, dtype=bool) & ~HEALER[units.type_id[:, None, :n]]
    distance, dx, dy = geometry.place[..., :n]
    patient, reachable = _lowest(distance, scene.avail[..., N_NORMAL_ACTIONS : N_NORMAL_ACTIONS + n] & hurt & fighter)
    goal, somebody = _lowest(np.where(hurt, distance, distance + 1000.0), fighter)
    walk, _ = _walk(scene, _pick(dx, goal), _pick(dy, goal))
    follow = somebody & (_pick(distance, goal) > HEALER_DISTANCE)
    return np.where(reachable, N_NORMAL_ACTIONS + patient, np.where(follow, walk, STOP))


def _walk(scene: Scene, dx: np.ndarray, dy: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the move action [B, n] that fits the direction best, and whether it does not lead the wrong way.

    The longer axis comes first, then the shorter one, then its opposite (along a wall), then stop.
    """
    along_x = np.where(dx > 0, EAST, WEST)
    along_y = np.where(dy > 0, NORTH, SOUTH)
    x_first = np.abs(dx) > np.abs(dy)
    first, second = np.where(x_first, along_x, along_y), np.where(x_first, along_y, along_x)
    third = np.where(x_first, NORTH + SOUTH, EAST + WEST) - second
    actions = np.full(dx.shape, STOP)
    for candidate in (third, second, first):
        actions = np.where(_pick(scene.avail, candidate), candidate, actions)
    return actions, actions != STOP


def _hurtable(scene: Scene) -> np.ndarray:
    """Return [B, n, m]: the agent's weapon can hurt that enemy's type."""
    kind, n = scene.units.type_id, scene.n_agents
    return CAN_HURT[kind[:, :n, None], kind[:, None, n:]]


def _targets(scene: Scene) -> np.ndarray:
    """Return [B, n, m]: enemies that are available to attack and worth it."""
    hurtable = _hurtable(scene)  # there are more actions than enemies where healers have more allies
    return scene.avail[..., N_NORMAL_ACTIONS : N_NORMAL_ACTIONS + hurtable.shape[-1]] & hurtable


def _lowest(score: np.ndarray, among: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the index of the lowest score where `among`, and whether there is any; both [B, n]."""
    return np.argmin(np.where(among, score, np.inf), axis=-1), np.asarray(among.any(axis=-1))


def _pick(values: np.ndarray, index: np.ndarray) -> np.ndarray:
    return np.take_along_axis(values, index[..., None], axis=-1)[..., 0]
