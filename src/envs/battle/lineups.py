"""SMACv2's random teams and start positions, in cells.

Source: oxwhirl/smacv2, distributions.py (`weighted_teams`, `surrounded`, `reflect_position`, `surrounded_and_reflect`).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from omagd.envs.battle.args import BUFFER, MOST_GROUPS, OFFSET, CapabilityArgs, StartArgs, TeamArgs
from omagd.utils.seeding import generator

ALLY_PLACE, ENEMY_PLACE = (8.0, 16.0), (24.0, 16.0)  # without random start positions


@dataclass(frozen=True)
class Lineup:
    """Teams and start positions of a battle.

    Attributes:
        allies, enemies: names of unit types.
        ally_places: [n, 2] float64. enemy_places: [m, 2] float64.
    """

    allies: tuple[str, ...]
    enemies: tuple[str, ...]
    ally_places: np.ndarray
    enemy_places: np.ndarray


def draw_lineup(config: CapabilityArgs, seed: int, attempt: int = 0) -> Lineup:
    """Return the lineup that follows from `seed` and `attempt`."""
    n, m, rng = config.n_units, config.enemies, generator(seed, "lineup", attempt)
    allies = _team(config.team_gen, n, rng)
    enemies = allies[:m] + (_team(config.team_gen, m - n, rng) if m > n else ())
    places = np.tile(ALLY_PLACE, (n, 1)), np.tile(ENEMY_PLACE, (m, 1))
    start = config.start_positions
    if start is not None:
        surrounds = start.dist_type == "surrounded"
        if start.dist_type == "surrounded_and_reflect":
            surrounds = rng.random() > start.p
        places = (_surrounded if surrounds else _reflected)(start, n, m, rng)
    return Lineup(allies, enemies, *places)


def _team(config: TeamArgs, size: int, rng: np.random.Generator) -> tuple[str, ...]:
    """Draw all units by their weights; repeat while the team has exception types only."""
    while True:
        team = rng.choice(config.unit_types, size=size, p=config.weights).tolist()
        if any(kind not in config.exception_unit_types for kind in team):
            return tuple(team)


def _surrounded(start: StartArgs, n: int, m: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Place allies in the middle and enemies in one to four groups, each at a random point of its own diagonal."""
    size = np.array([start.map_x, start.map_y], float)
    groups = int(rng.integers(1, MOST_GROUPS + 1))
    members = rng.multinomial(m, np.full(groups, 1 / groups))
    nearness = rng.random((groups, 1))
    corners = np.array([(0, 0), (0, 1), (1, 1), (1, 0)])[rng.choice(4, groups, replace=False)]
    inner = size / 2 + np.where(corners == 1, OFFSET, -OFFSET)
    places = inner * nearness + corners * size * (1 - nearness)
    return np.tile(size / 2, (n, 1)), places.repeat(members, axis=0)


def _reflected(start: StartArgs, n: int, m: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Place allies randomly in the left half, enemies mirrored, and further enemies randomly in the right half."""
    half, top = start.map_x / 2, start.map_y
    allies = rng.uniform((0, 0), (half - BUFFER, top), (n, 2))
    enemies = np.stack([start.map_x - allies[:m, 0], allies[:m, 1]], axis=1)
    more = rng.uniform((half, 0), (start.map_x, top), (max(m - n, 0), 2))
    return allies, np.concatenate([enemies, more])
