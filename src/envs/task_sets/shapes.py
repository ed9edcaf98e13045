"""The common shape of several maps: that of the largest ones, with zeros where a map has fewer units.

A unit that a map does not have looks like one that is dead from the beginning: zeros in observations and state. An
absent agent can only choose action 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from omagd.config.env_info import EntityLayout, EnvInfo, StateLayout
from omagd.utils.errors import UserError

UNITS = ("move_dim", "enemy_dim", "ally_dim", "own_dim", "position", "sight", "health", "healer")


def common_info(infos: Sequence[EnvInfo], label: str, n_training: int) -> EnvInfo:
    """Return the facts of a set from those of its maps. label: name of the set.

    Errors: UserError for maps without units, and for maps whose units have different features.
    """
    first = infos[0]
    layouts = [_layout(info) for info in infos]
    states = [_state_layout(info) for info in infos]
    for info in infos:
        here, there = unit_features(info), unit_features(first)
        different = [name for name in here if here[name] != there[name]]
        if different:
            name = different[0]
            raise UserError(
                f"env_args.map_name: {info.map_name} and {first.map_name} cannot be in one set: {name} is"
                f" {here[name]} and {there[name]}. Give maps whose units have the same features"
            )
    largest = replace(
        layouts[0],
        n_enemies=max(layout.n_enemies for layout in layouts),
        n_allies=max(layout.n_allies for layout in layouts),
    )
    n_agents, n_actions = max(info.n_agents for info in infos), max(info.n_actions for info in infos)
    state = replace(
        states[0], n_allies=n_agents, n_enemies=largest.n_enemies, last_actions=n_actions * bool(states[0].last_actions)
    )
    others = first.state_dim - states[0].width
    scripts = [name for name in first.scripted_policies if all(name in info.scripted_policies for info in infos)]
    sizes = {(info.n_agents, info.n_actions, info.obs_dim, info.state_dim) for info in infos}
    return replace(
        first, map_name=label, n_agents=n_agents, n_actions=n_actions, obs_dim=largest.obs_dim,
        state_dim=state.width + others, episode_limit=max(info.episode_limit for info in infos), layout=largest,
        state_layout=state, scripted_policies=tuple(scripts), tasks=tuple(info.map_name for info in infos),
        n_training=n_training, padded=len(sizes) > 1,
    )  # fmt: skip


def _layout(info: EnvInfo) -> EntityLayout:
    if info.layout is None:
        raise UserError(f"env={info.name} has no units: a set of maps needs an environment with an entity layout")
    return info.layout


def _state_layout(info: EnvInfo) -> StateLayout:
    if info.state_layout is None:
        raise UserError(
            f"env_args.map_name: {info.map_name} has a state without units, which a set of maps needs. Where"
            " env_args.obs_instead_of_state=True is given, leave it out"
        )
    return info.state_layout


def unit_features(info: EnvInfo) -> dict[str, object]:
    """Return what all maps that one policy plays must have in common, by name. Errors: as `common_info`."""
    layout, state = _layout(info), _state_layout(info)
    return {
        **{name: getattr(layout, name) for name in UNITS},
        "n_normal_actions": info.n_normal_actions,
        "features of an ally in the state": state.ally_dim,
        "features of an enemy in the state": state.enemy_dim,
        "other features of the state": info.state_dim - state.width,
        "last actions in the state": bool(state.last_actions),
        "agent_rewards": info.agent_rewards,
    }


class Placement:
    """Where the numbers of one map stand in arrays of the common shape.

    Args:
        info: of the map. common: of the set.

    Attributes:
        n_agents, n_actions: of the map. obs: [obs_dim], state: [state_dim] of the map, int64 columns in the common
            arrays.
    """

    def __init__(self, info: EnvInfo, common: EnvInfo) -> None:
        assert info.layout is not None and common.layout is not None
        assert info.state_layout is not None and common.state_layout is not None
        self.n_agents, self.n_actions = info.n_agents, info.n_actions
        own, wide = info.layout, common.layout
        self.obs = _columns(
            common.obs_dim,
            (wide.move_dim, own.move_dim),
            (wide.n_enemies * wide.enemy_dim, own.n_enemies * own.enemy_dim),
            (wide.n_allies * wide.ally_dim, own.n_allies * own.ally_dim),
            (wide.own_dim, own.own_dim),
        )
        state, broad = info.state_layout, common.state_layout
        last = np.arange(broad.n_allies * broad.last_actions).reshape(broad.n_allies, broad.last_actions)
        others = info.state_dim - state.width
        units = _columns(
            broad.units_dim,
            (broad.n_allies * broad.ally_dim, state.n_allies * state.ally_dim),
            (broad.n_enemies * broad.enemy_dim, state.n_enemies * state.enemy_dim),
        )
        self.state = np.concatenate([
            units,
            broad.units_dim + last[: state.n_allies, : state.last_actions].ravel(),
            broad.width + np.arange(others),
        ])  # fmt: skip


def _columns(total: int, *parts: tuple[int, int]) -> np.ndarray:
    """Return the first columns of each part: (width in the common array, columns of the map)."""
    starts = np.cumsum([0, *(wide for wide, _ in parts)])
    assert starts[-1] == total
    return np.concatenate([start + np.arange(used) for start, (_, used) in zip(starts[:-1], parts, strict=True)])
