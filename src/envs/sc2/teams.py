"""SMACv2's random teams and start positions, drawn from a battle's seed.

The distributions are those of oxwhirl/smacv2 (distributions.py): `weighted_teams`, `surrounded`, `reflect_position` and
`surrounded_and_reflect`. Places are in cells.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from omagd.envs.battle.v2_args import CapabilityArgs, StartArgs, TeamArgs
from omagd.utils.seeding import generator

ALLY_PLACE, ENEMY_PLACE = (8.0, 16.0), (24.0, 16.0)  # without random start positions
OFFSET = 2.0  # from the centre to where the diagonals begin: enemies do not appear on top of allies
BUFFER = 1.0  # between the middle of the field and the allies


@dataclass(frozen=True)
class Lineup:
    """Who fights, and where each unit appears.

    Attributes:
        allies, enemies: names of unit types.
        ally_places: [n, 2] float64. enemy_places: [m, 2] likewise.
    """

    allies: tuple[str, ...]
    enemies: tuple[str, ...]
    ally_places: np.ndarray
    enemy_places: np.ndarray


def draw_lineup(config: CapabilityArgs, seed: int, attempt: int = 0) -> Lineup:
    """Return the battle that follows from `seed`, or in another `attempt` another one."""
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
    """Draw every unit by the weights, all again while there are exception types only."""
    while True:
        team = rng.choice(config.unit_types, size=size, p=config.weights).tolist()
        if any(kind not in config.exception_unit_types for kind in team):
            return tuple(team)


def _surrounded(start: StartArgs, n: int, m: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Put allies into the middle, enemies into one to four groups, each anywhere on a diagonal of its own."""
    size = np.array([start.map_x, start.map_y], float)
    groups = int(rng.integers(1, 5))
    members = rng.multinomial(m, np.full(groups, 1 / groups))
    nearness = rng.random((groups, 1))
    corners = np.array([(0, 0), (0, 1), (1, 1), (1, 0)])[rng.choice(4, groups, replace=False)]
    inner = size / 2 + np.where(corners == 1, OFFSET, -OFFSET)
    places = inner * nearness + corners * size * (1 - nearness)
    return np.tile(size / 2, (n, 1)), places.repeat(members, axis=0)


def _reflected(start: StartArgs, n: int, m: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Put allies anywhere in the left half, enemies where a mirror shows them; more enemies anywhere in the right."""
    half, top = start.map_x / 2, start.map_y
    allies = rng.uniform((0, 0), (half - BUFFER, top), (n, 2))
    enemies = np.stack([start.map_x - allies[:m, 0], allies[:m, 1]], axis=1)
    more = rng.uniform((half, 0), (start.map_x, top), (max(m - n, 0), 2))
    return allies, np.concatenate([enemies, more])
