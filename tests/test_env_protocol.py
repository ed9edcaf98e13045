"""Every registered environment keeps the protocol: new environments are tested as soon as they are registered."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from importlib.util import find_spec
from typing import Any

import foreign_worlds
import numpy as np
import pytest
import sc2_stand_in
import torch
from plugin_toys import own_names

from omagd.components.episode_codec import Codec, spec_of
from omagd.envs import REGISTRY
from omagd.envs.factory import make_env
from omagd.envs.protocol import BatchedEnv, random_actions
from omagd.envs.task_set_env import TaskSetEnv
from omagd.envs.task_sets import TaskSet
from omagd.modules.graph_reconstructers.graphs import obs_to_nodes
from omagd.run.checkpoint.store import pack, unpack

SLOTS = 4
SMALL_ARGS = {
    **foreign_worlds.SMALL, "smax": {"map_name": "3m", "max_steps": 30},
    "jaxmarl": {"key": "MPE_simple_speaker_listener_v4", "max_steps": 9, "time_limit": 5},
    "skirmish": {"map_name": "3m", "obs_last_action": True, "obs_timestep_number": True},
    "lbf": {"map_name": "2s-8x8-2p-2f-coop"}, "mpe": {"num_agent_neighbors": 1}, "rware": {"time_limit": 50},
    "sc2_v2": {"reward_scale_fix": True, "conic_fov": True},
}  # fmt: skip
# `sc2_v2` plays on a stand-in for the game; `sc2` differs from it in rules that test_smac_parity.py checks.
NAMES = [
    pytest.param(name, marks=pytest.mark.processes) if name == "sc2_v2" else name
    for name in REGISTRY.names()
    if name != "sc2"
]
A_SET = "a set of maps"
NAMES.append(A_SET)
OURS = own_names(REGISTRY)
WITHOUT_CHANCE = {"matrix_game", *REGISTRY.names()} - (set(OURS) - {"matrix_game"})


@cache
def _build(name: str, n_slots: int) -> BatchedEnv:
    if name == A_SET:  # all slots play its first map, in the shape of the second
        maps = TaskSet("set", ("3m",), ("5m_vs_6m",))
        return TaskSetEnv(lambda of, slots: make_env("skirmish", {"map_name": of}, slots, False), maps, n_slots)
    return make_env(name, SMALL_ARGS.get(name, {}), n_slots, processes=False)


@pytest.fixture(scope="module", autouse=True)
def game(tmp_path_factory) -> Iterator[None]:
    """Install the stand-in for the game; end its processes after the last test."""
    with pytest.MonkeyPatch.context() as patch:
        folder = sc2_stand_in.install(tmp_path_factory.mktemp("sc2") / "StarCraftII")
        patch.setenv("SC2PATH", str(folder))
        yield
        _build("sc2_v2", SLOTS).close()
        assert sc2_stand_in.running(folder) == []


@pytest.fixture(params=NAMES)
def name(request) -> str:
    if request.param in ("smax", "jaxmarl") and find_spec("jaxmarl") is None:
        pytest.skip(f"the extra [{request.param}] is not installed")
    return request.param


@pytest.fixture
def env(name) -> BatchedEnv:
    return _build(name, SLOTS)


@pytest.fixture
def seeded(env) -> BatchedEnv:
    """An environment that promises that its episodes follow from their seeds and actions."""
    if not env.deterministic:
        pytest.skip(f"{env.info.name} does not say deterministic = True")
    return env


@dataclass
class Episode:
    """One slot's episode: observations before each step and after the last, results of each step."""

    shown: list[dict[str, np.ndarray]] = field(default_factory=list)
    results: list[tuple[float, bool, bool]] = field(default_factory=list)
    info: dict[str, float] = field(default_factory=dict)


def _shown(env: BatchedEnv) -> dict[str, np.ndarray]:
    return {name: array.copy() for name, array in vars(env.observe(full=True)).items()}


def _choose(avail: np.ndarray, rngs: list[np.random.Generator]) -> np.ndarray:
    """Draw one available action per agent, from a generator for each slot."""
    return np.stack([random_actions(mask, rng) for mask, rng in zip(avail, rngs, strict=True)])


def _play(env: BatchedEnv, seeds: list[int], reset: bool = True, steps: int = 10**6) -> list[Episode]:
    """Play the slots to their ends (or `steps`), each with actions that follow from its seed alone."""
    b, rngs = env.n_slots, [np.random.default_rng(seed) for seed in seeds]
    if reset:
        env.reset(np.ones(b, bool), np.array(seeds, np.int64))
    episodes, active = [Episode() for _ in range(b)], np.ones(b, bool)
    for _ in range(steps):
        shown = _shown(env)
        result = env.step(_choose(shown["avail_actions"], rngs), active)
        for slot in np.flatnonzero(active):
            episodes[slot].shown.append({key: value[slot] for key, value in shown.items()})
            values = result.reward[slot], result.terminated[slot], result.truncated[slot]
            episodes[slot].results.append(tuple(value.item() for value in values))
            if result.terminated[slot]:
                episodes[slot].info = {key: float(value[slot]) for key, value in result.info.items()}
        active &= ~result.terminated
        if not active.any():
            break
    last = _shown(env)
    for slot, episode in enumerate(episodes):
        episode.shown.append({key: value[slot] for key, value in last.items()})
    return episodes


def _assert_same(episodes: list[Episode], others: list[Episode]) -> None:
    for one, other in zip(episodes, others, strict=True):
        assert (one.results, one.info) == (other.results, other.info)
        for a, b in zip(one.shown, other.shown, strict=True):
            _assert_equal(a, b)


def _assert_equal(one: dict[str, np.ndarray], other: dict[str, np.ndarray], rows: Any = ...) -> None:
    for key in one:
        np.testing.assert_array_equal(one[key][rows], other[key][rows], err_msg=key)


def test_sizes_are_those_of_the_info(env):
    info, b = env.info, env.n_slots
    env.reset(np.ones(b, bool), np.arange(b))
    assert env.observe().full_obs is None
    obs, state, masks = (b, info.n_agents, info.obs_dim), (b, info.state_dim), (b, info.n_agents, info.n_actions)
    expected = {"obs": (obs, "float32"), "full_obs": (obs, "float32"), "state": (state, "float32")}
    assert {name: (array.shape, array.dtype) for name, array in _shown(env).items()} == {
        **expected, "avail_actions": (masks, "bool"),
    }  # fmt: skip
    if info.layout is not None:
        assert info.layout.obs_dim == info.obs_dim
        assert info.layout.n_allies == info.n_agents - 1
        assert info.n_actions in (info.n_normal_actions, info.n_normal_actions + info.layout.n_enemies)


def test_an_episode_is_well_formed(env):
    for episode in _play(env, [11, 12, 13, 14]):
        assert 1 <= len(episode.results) <= env.info.episode_limit
        rewards, terminated, truncated = zip(*episode.results, strict=True)
        assert np.isfinite(rewards).all()
        assert terminated[-1] and not any(terminated[:-1])
        assert not any(truncated[:-1])
        for shown in episode.shown:
            assert shown["avail_actions"].any(-1).all()
            assert all(np.isfinite(shown[key]).all() for key in ("obs", "full_obs", "state"))
        if env.info.has_win:
            assert episode.info["battle_won"] in (0.0, 1.0)


def test_an_episode_follows_from_its_seed_and_its_actions(name, seeded):
    first = _play(seeded, [3, 4, 5, 2**40 + 6])
    _assert_same(first, _play(seeded, [3, 4, 5, 2**40 + 6]))
    if name not in WITHOUT_CHANCE:
        states = [np.concatenate([shown["state"] for shown in episode.shown[:2]]).tobytes() for episode in first]
        assert len(set(states)) > 1


def test_a_batch_is_many_single_battles(name, seeded):
    if name in ("smax", "jaxmarl"):
        pytest.skip(f"test_{name}.py compares a batch with a single battle, without compiling one")
    seeds, single = [21, 22, 23, 24], _build(name, 1)
    _assert_same(_play(seeded, seeds), [_play(single, [seed])[0] for seed in seeds])


def test_the_replay_codec_is_lossless(env):
    for played in _play(env, [41, 42, 43, 44]):
        fields = {name: np.stack([shown[name] for shown in played.shown]) for name in played.shown[0]}
        episode = {name: torch.from_numpy(value) for name, value in fields.items()}
        codec = Codec(spec_of(episode))
        of_obs = np.prod(fields["obs"].shape[1:])
        masks = np.prod(fields["avail_actions"].shape[1:])
        plain = sum(value[0].nbytes for name, value in fields.items() if name in {"full_obs", "state"})
        assert codec.width == plain + -(-of_obs // 8) + -(-masks // 8)
        for name, value in codec.decode(codec.encode(episode)[0]).items():
            assert value.numpy().tobytes() == fields[name].tobytes(), name


def test_inactive_slots_do_not_change(name, env):
    b = env.n_slots
    env.reset(np.ones(b, bool), np.arange(b) + 50)
    before = _shown(env)
    active = np.arange(b) % 2 == 0
    rngs = [np.random.default_rng(slot) for slot in range(b)]
    result = env.step(_choose(before["avail_actions"], rngs), active)
    after = _shown(env)
    _assert_equal(before, after, ~active)
    assert (before["state"][active] != after["state"][active]).any() or name not in OURS
    for values in (result.reward, result.terminated, result.truncated, *result.info.values()):
        assert values.shape == (b,) and not values[~active].any()


def test_a_reset_changes_only_its_slots(env):
    b = env.n_slots
    _play(env, [31, 32, 33, 34], steps=1)
    before = _shown(env)
    which = np.arange(b) < 2
    env.reset(which, np.full(b, 99))
    after = _shown(env)
    _assert_equal(before, after, ~which)
    assert not env.deterministic or all((values[0] == values[1]).all() for values in after.values())


def test_a_snapshot_continues_the_same_battle(name, env):
    """Snapshots are optional in other packages; one that can be taken must continue to the bit."""
    _play(env, [41, 42, 43, 44], steps=1)
    try:
        torch.save(pack(env.snapshot()), file := io.BytesIO())
    except NotImplementedError:
        assert name.startswith("sc2") or name not in OURS
        with pytest.raises(NotImplementedError, match="mid-battle"):
            env.restore({})
        pytest.skip(f"{env.info.name} cannot be saved in mid-battle")
    expected = _play(env, [1, 2, 3, 4], reset=False, steps=5)
    other_env = _build.__wrapped__(name, SLOTS)
    _play(other_env, [7, 7, 7, 7], steps=2)
    file.seek(0)
    other_env.restore(unpack(torch.load(file, weights_only=True)))
    _assert_same(expected, _play(other_env, [1, 2, 3, 4], reset=False, steps=5))


def test_a_frame_shows_the_units_where_agents_see_them(env):
    """The places of a frame, from agent to unit, are the ones in the observations."""
    b, layout, rng = env.n_slots, env.info.layout, np.random.default_rng(0)
    env.reset(np.ones(b, bool), np.arange(b) + 70)
    checked = 0
    for _ in range(8):
        shown, frame = env.observe(full=True), env.frame(1)
        json.dumps(frame.to_dict(), allow_nan=False)
        scene, units = frame.scene, len(frame.scene.ids)
        n = scene.teams.count(0)
        assert len(set(scene.ids)) == units == len(frame.x) == len(frame.y) == len(frame.alive) == len(scene.kinds)
        assert n <= env.info.n_agents and scene.teams[:n] == (0,) * n and len(scene.actions) <= env.info.n_actions
        for values in (frame.health, frame.shield, frame.targets, frame.bodies, scene.health_max, scene.heals):
            assert len(values) in (0, units)
        assert all(-1 <= target < units for target in frame.targets)
        obs = shown.full_obs[1].copy()
        if layout is not None and scene.bounds is not None:
            (x0, y0, x1, y1), size = scene.bounds, np.array(scene.bounds[2:]) - scene.bounds[:2]
            nodes, place = obs_to_nodes(torch.from_numpy(obs), layout).numpy(), np.array([frame.x, frame.y]).T
            assert ((place > (x0 - 1, y0 - 1)) & (place < (x1 + 1, y1 + 1)))[np.array(frame.alive)].all()
            for agent in np.flatnonzero(frame.alive[:n]).tolist():
                mates, sight = [i for i in range(n) if i != agent], (scene.sight[agent] or layout.sight)
                mates += [None] * (layout.n_allies - len(mates))
                for unit, node in zip([*mates, *range(n, n + layout.n_enemies)], nodes[agent, 1:], strict=True):
                    if node.any():
                        gap = place[unit] - place[agent] - node[list(layout.position)] * sight
                        gap -= np.round(gap / size) * size if scene.torus else 0
                        np.testing.assert_allclose(gap, 0, atol=0.02)
                        assert frame.alive[unit]
                        checked += 1
        if env.step(_choose(env.observe().avail_actions, [rng] * b), np.ones(b, bool)).terminated.any():
            break
    assert checked or layout is None or env.info.name not in OURS


def test_scripted_policies_play_what_is_available_and_nothing_else_can_be_played(name, env):
    b = env.n_slots
    rng = np.random.default_rng(0)
    for policy in env.info.scripted_policies:
        env.reset(np.ones(b, bool), np.arange(b))
        active = np.ones(b, bool)
        while active.any():
            avail = env.observe().avail_actions.copy()
            actions = env.scripted_actions(policy, rng)
            assert actions.shape == (b, env.info.n_agents)
            assert np.take_along_axis(avail, actions[..., None], -1)[active].all()
            active &= ~env.step(actions, active).terminated
    with pytest.raises(NotImplementedError, match="no_such_policy"):
        env.scripted_actions("no_such_policy", rng)
    if name in {*OURS, A_SET} - {*foreign_worlds.SMALL, "lbf", "mpe", "rware"}:
        env.reset(np.ones(b, bool), np.arange(b))
        avail, actions = env.observe().avail_actions, env.scripted_actions("random", rng)
        actions[2, 1] = wrong = np.append(~avail[2, 1], True).argmax()
        with pytest.raises(ValueError, match=f"slot .*, agent 1: action {wrong} is not available"):
            env.step(actions, np.ones(b, bool))


def test_random_actions_are_uniform_over_the_available_ones():
    mask = np.array([[True, False, True, True], [False, True, False, False]])
    drawn = random_actions(np.broadcast_to(mask, (6000, 2, 4)), np.random.default_rng(0))
    shares = [np.bincount(each, minlength=4) / 6000 for each in drawn.T]
    np.testing.assert_allclose(shares, mask / mask.sum(1, keepdims=True), atol=0.03)


def test_full_obs_adds_units_and_changes_none_that_is_seen(name, env):
    layout = env.info.layout
    if layout is None:
        pytest.skip(f"{env.info.name} has no entity layout")
    sizes = [layout.enemy_dim] * layout.n_enemies + [layout.ally_dim] * layout.n_allies
    ends = layout.move_dim + np.cumsum([0, *sizes])
    hidden = 0
    for shown in (shown for episode in _play(env, [61, 62, 63, 64]) for shown in episode.shown):
        first, *units, last = zip(*(np.split(shown[name], ends, axis=-1) for name in ("obs", "full_obs")), strict=True)
        for seen, full in units:
            is_seen = seen.any(-1)
            np.testing.assert_array_equal(seen[is_seen].view(np.int32), full[is_seen].view(np.int32))
            hidden += int((~is_seen & full.any(-1)).sum())
        for seen, full in (first, last):
            np.testing.assert_array_equal(seen, full)
    assert hidden > 0 or name not in OURS
