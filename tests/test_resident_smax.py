"""SMAX where agents act: the rounds of `runner=parallel`, in memory that JAX and torch share."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from resident_toys import CPU, SLOTS, assert_same, explore, fixed_shapes, game, played

from omagd import runners
from omagd.config.loading import resolve
from omagd.controllers.types import Exploration
from omagd.envs.smax import SmaxArgs, SmaxEnv
from omagd.utils.errors import UserError


@pytest.fixture(scope="module")
def env() -> SmaxEnv:
    pytest.importorskip("jaxmarl", reason="the extra [smax] is not installed")
    return SmaxEnv(SmaxArgs(map_name="3m", max_steps=6, continuing_episode=True), SLOTS)


def test_rounds_are_those_of_the_environment(env):
    """Episodes of one round end at different steps; some are cut off."""
    options = {"mac": "n_graph_mac", "use_graph_reconstruction": True}
    both = [game(runner=runner, env=env, **options) for runner in ("parallel", "resident")]
    for episodes, full in ((1, False), (2, True)):
        one, other = (
            played(plays, mac, explore=None, episodes_per_slot=episodes, full_obs=full) for plays, mac in both
        )
        assert one.n_episodes == episodes * SLOTS
        assert 0 < sum(entry["episode_limit"] for entry in one.log)
        assert_same(one, other, rounded=("recon",), ordered=episodes == 1)


def test_an_episode_follows_from_its_seed_and_a_tick_reads_no_value(env):
    plays, mac = game(env=env)
    first = played(plays, mac, explore=explore(0.5))
    with fixed_shapes():
        for (loop,) in (plays._made[1], plays._resident(mac, 2 * SLOTS, True, True)):
            loop._begin(np.arange(loop.round.episodes), explore(0.5))
            for _ in range(3):
                loop.tick()
    plays.stream.load_state_dict({"played": [0] * SLOTS, "generation": 0})
    assert_same(played(plays, mac, explore=Exploration(0.5, np.random.default_rng(7))), first)


def test_values_pass_without_a_copy(env):
    """What JAX is given lies at the address of the tensor, what torch is given at that of the array."""
    battles = env.resident(CPU, SLOTS)
    assert battles._to_jax(battles._chosen).unsafe_buffer_pointer() == battles._chosen.data_ptr()
    assert battles._to_jax(battles._active).unsafe_buffer_pointer() == battles._active.data_ptr()
    battles.reset(torch.ones(SLOTS, dtype=torch.bool), torch.arange(SLOTS) + (5 << 40))
    array = battles._program.view(battles._state)["obs"]
    assert battles._to_torch(array).data_ptr() == array.unsafe_buffer_pointer()
    words = np.asarray(battles._keys).astype(np.int64)
    assert (words[:, 0] << 32 | words[:, 1]).tolist() == [(5 << 40) + slot for slot in range(SLOTS)]


@pytest.mark.parametrize(("variable", "key"), [(None, "env_args.jax_platform"), ("cpu", "JAX_PLATFORMS")])
def test_jax_plays_where_agents_act(monkeypatch, variable, key):
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    if variable:
        monkeypatch.setenv("JAX_PLATFORMS", variable)
    config = resolve(config="qmix", env_config="smax", updates={"runner": "resident"})
    runners.REGISTRY.get("resident").check(config)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(UserError, match=f"{key}=cuda, not cpu, where agents act on a GPU. Use runner=parallel"):
        runners.REGISTRY.get("resident").check(config)
