"""Observation graphs: layout, exact round trip, what counts as unseen."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from omagd.config.env_info import EntityLayout
from omagd.modules.graph_reconstructers.graphs import alive, feature_mask, nodes_to_obs, obs_to_nodes, unseen

layouts = st.builds(
    EntityLayout,
    move_dim=st.integers(0, 6),
    n_enemies=st.integers(1, 5),
    enemy_dim=st.integers(1, 9),
    n_allies=st.integers(0, 4),
    ally_dim=st.integers(1, 9),
    own_dim=st.integers(1, 11),
)


@settings(max_examples=60, deadline=None)
@given(layout=layouts, seed=st.integers(0, 2**32 - 1), lead=st.lists(st.integers(0, 3), max_size=3))
def test_there_and_back_is_the_same_bit_for_bit(layout: EntityLayout, seed: int, lead: list[int]) -> None:
    rng = np.random.default_rng(seed)
    # Any bit pattern at all: also -0.0, infinities, NaN and subnormals.
    bits = rng.integers(0, 2**32, (*lead, layout.obs_dim), dtype=np.uint32)
    for obs in (bits.view(np.float32), torch.from_numpy(bits.view(np.float32).copy())):
        back = nodes_to_obs(obs_to_nodes(obs, layout), layout)
        assert type(back) is type(obs)
        assert np.array_equal(np.ascontiguousarray(np.asarray(back)).view(np.uint32), bits)


def test_features_stand_where_they_belong() -> None:
    layout = EntityLayout(move_dim=4, n_enemies=2, enemy_dim=5, n_allies=1, ally_dim=6, own_dim=1)
    obs = np.arange(1, layout.obs_dim + 1, dtype=np.float32)
    nodes = obs_to_nodes(obs, layout)
    assert nodes.shape == (4, 9)
    assert nodes[0].tolist() == [1, 0, 0, 0, 1, 2, 3, 4, 21]
    assert nodes[1].tolist() == [15, 16, 17, 18, 19, 20, 0, 0, 0]
    assert nodes[2].tolist() == [5, 6, 7, 8, 9, 0, 0, 0, 0]
    assert nodes[3].tolist() == [10, 11, 12, 13, 14, 0, 0, 0, 0]
    assert (nodes != 0)[feature_mask(layout).numpy()].all()
    assert feature_mask(layout).sum() == layout.obs_dim
    layout = EntityLayout(move_dim=1, n_enemies=2, enemy_dim=5, n_allies=2, ally_dim=5, own_dim=1)
    first = obs_to_nodes(np.arange(layout.obs_dim, dtype=np.float32), layout)[1:, 0]
    assert first.tolist() == [11, 16, 1, 6], "each in the environment's order"


def test_unseen_nodes_are_all_zero_and_the_agent_itself_is_never_unseen() -> None:
    layout = EntityLayout(move_dim=0, n_enemies=1, enemy_dim=13, n_allies=1, ally_dim=13, own_dim=10)
    obs = np.zeros((2, layout.obs_dim), np.float32)
    obs[:, -10:] = 7
    obs[1, 4] = 0.5
    nodes = obs_to_nodes(obs, layout)
    assert nodes[0, 0].tolist() == [1, 0, 0, 0, *[7] * 10], "the fixed head stays without move features"
    assert unseen(nodes).tolist() == [[False, True, True], [False, True, False]]
    assert not unseen(torch.zeros(2, 3, 4))[:, 0].any()


def test_only_an_observer_that_sees_nothing_is_dead() -> None:
    assert alive(np.array([[0.0, 0.0], [0.0, 0.1]])).tolist() == [False, True]
    with pytest.raises(ValueError, match="features"):
        obs_to_nodes(np.zeros(5, np.float32), EntityLayout(1, 1, 1, 1, 1, 1))
