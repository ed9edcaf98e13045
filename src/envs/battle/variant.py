"""In what observations, state and actions of SMACv2 differ from SMAC's."""

from __future__ import annotations

from dataclasses import dataclass

from omagd.envs.battle.actions import N_NORMAL_ACTIONS
from omagd.envs.battle.maps import HEALING, MapSpec


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
