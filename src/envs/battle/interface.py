"""SMAC's class interface to one battle: the methods of `StarCraft2Env` under the same names.

Source: oxwhirl/smac and oxwhirl/smacv2 (starcraft2.py, multiagentenv.py). docs/smac.md lists the methods.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from omagd.envs.battle.args import BattleArgs
from omagd.envs.battle.features import state_component, state_unit_dims
from omagd.envs.battle.maps import MapSpec
from omagd.envs.battle.semantics import BattleEnv
from omagd.envs.single import BatchedAsSingle


class SmacInterface(BatchedAsSingle):
    """A battle environment with one slot and all methods of SMAC's `StarCraft2Env` except `render`.

    Arrays are NumPy: observations [n, obs_dim] float32, masks [n, A] bool. `agent_id` counts from 0.

    Attributes:
        n_agents, n_enemies, n_actions, episode_limit, map_name, map_type: as in SMAC.
    """

    env: BattleEnv

    def __init__(self, env: BattleEnv) -> None:
        spec, args = env.spec, env.args
        ally, enemy = state_unit_dims(spec, args)
        self.ally_state_attr_names, self.enemy_state_attr_names = feature_names(spec, args)
        facts = {
            "state_component": state_component(spec, args), "map_type": spec.map_type,
            "state_ally_feats_size": ally, "state_enemy_feats_size": enemy,
            "agent_features": self.ally_state_attr_names, "enemy_features": self.enemy_state_attr_names,
        }  # fmt: skip
        super().__init__(env, facts)
        assert env.info.layout is not None
        self._layout = env.info.layout
        self.n_agents, self.n_enemies, self.n_actions = spec.n_agents, spec.n_enemies, env.info.n_actions
        self.episode_limit, self.map_name, self.map_type = spec.limit, spec.name, spec.map_type

    def reset(self, seed: int | None = None) -> tuple[np.ndarray, np.ndarray]:
        """Start an episode; return observations [n, obs_dim] and state [state_dim]."""
        super().reset(seed)
        return self.get_obs(), self.get_state()

    def seed(self) -> int | None:
        """Return the current seed: of the game, in `skirmish` of the battle; None if there is none yet."""
        return self.env.seed()

    def get_obs_agent(self, agent_id: int, fully_observable: bool = False) -> np.ndarray:
        """Return [obs_dim] float32 of one agent; without the sight range if `fully_observable` (SMACv2's argument)."""
        return self.get_obs(no_range_limit=fully_observable)[agent_id]

    def get_avail_agent_actions(self, agent_id: int) -> np.ndarray:
        """Return [A] bool, the action mask of one agent."""
        return self.get_avail_actions()[agent_id]

    def get_state_dict(self) -> dict[str, np.ndarray]:
        """Return the parts of the state: `allies` [n, :], `enemies` [m, :], optional `last_action` and `timestep`."""
        return {name: part[0] for name, part in self.env.rules().state_parts().items()}

    def get_visibility_matrix(self) -> np.ndarray:
        """Return [n, n + m] bool: the unit is within the agent's sight range. As in SMAC, symmetric between allies."""
        return self.env.rules().visibility()[0]

    def get_obs_size(self) -> int:
        """Return obs_dim, the length of the vector that `get_obs_agent` returns (see docs/smac.md)."""
        return self.env.info.obs_dim

    def get_state_size(self) -> int:
        """Return state_dim."""
        return self.env.info.state_dim

    def get_total_actions(self) -> int:
        """Return A."""
        return self.env.info.n_actions

    def get_obs_move_feats_size(self) -> int:
        """Return the number of movement and terrain features in an observation."""
        return self._layout.move_dim

    def get_obs_enemy_feats_size(self) -> tuple[int, int]:
        """Return (m, number of features of an enemy in an observation)."""
        return self._layout.n_enemies, self._layout.enemy_dim

    def get_obs_ally_feats_size(self) -> tuple[int, int]:
        """Return (n - 1, number of features of an ally in an observation)."""
        return self._layout.n_allies, self._layout.ally_dim

    def get_obs_own_feats_size(self) -> int:
        """Return the number of features of the agent itself in an observation."""
        return self._layout.own_dim

    def get_ally_num_attributes(self) -> int:
        """Return the number of features of an ally in the state."""
        return len(self.ally_state_attr_names)

    def get_enemy_num_attributes(self) -> int:
        """Return the number of features of an enemy in the state."""
        return len(self.enemy_state_attr_names)


class SmacV2Interface(SmacInterface):
    """`SmacInterface` with SMACv2's capabilities, here the agents' unit types."""

    def get_cap_size(self) -> int:
        """Return the number of an agent's capabilities."""
        return self.env.spec.unit_type_bits

    def get_capabilities_agent(self, agent_id: int) -> np.ndarray:
        """Return [cap_shape] float32 of one agent."""
        return self.env.rules().type_bits()[0, agent_id]

    def get_capabilities(self) -> np.ndarray:
        """Return [n * cap_shape] float32 of all agents, concatenated."""
        return self.env.rules().type_bits()[0].ravel()

    def get_obs_own_feats_size(self) -> int:
        """Return the number of features of the agent itself; as in SMACv2, without the elapsed time."""
        return super().get_obs_own_feats_size() - int(self.env.args.obs_timestep_number)

    def get_env_info(self) -> dict[str, Any]:
        """Return the field's dictionary with `cap_shape`."""
        return {**super().get_env_info(), "cap_shape": self.get_cap_size()}


def feature_names(spec: MapSpec, args: BattleArgs) -> tuple[list[str], list[str]]:
    """Return SMAC's names of the state features of an ally and of an enemy, in order."""
    bits = [f"type_{bit}" for bit in range(spec.unit_type_bits)]
    ally = ["health", "energy/cooldown", "rel_x", "rel_y", *["shield"] * (spec.a_race == "P")]
    ally += ["fov_x", "fov_y"] * args.variant.direction
    enemy = ["health", "rel_x", "rel_y", *["shield"] * (spec.b_race == "P")]
    return ally + bits, enemy + bits
