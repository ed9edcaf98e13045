"""Every controller, agent and reconstruction on a device: the episodes of `runner=parallel`, in fixed shapes."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from resident_toys import SLOTS, assert_same, explore, fixed_shapes, game, on_simulated_gpu, played
from simulated_gpu import DEVICE, simulated_gpu

from omagd import controllers, runners
from omagd.config.loading import resolve
from omagd.envs.battle import maps
from omagd.envs.battle.maps import get_map
from omagd.envs.battle.skirmish_env import SkirmishEnv
from omagd.modules import agents
from omagd.resident.runner import plays_here
from omagd.utils.errors import UserError

GUESSED = {"mac": "n_graph_mac", "agent": "n_rnn", "use_graph_reconstruction": True}
GRAPHS = [
    {"mac": "gnn_graph_mac", "agent": "gnn_rnn"},
    {"mac": "gnn_graph_mac", "agent": "gnn_rnn", "use_full_obs": True},
    {**GUESSED, "acting_precision": "bf16"},
    {
        **GUESSED, "mask_predictor_config.decode": "argmax", "mask_predictor_config.use_gru": True,
        "mask_predictor_config.last_seen": False,
    },
    {**GUESSED, "mac": "gnn_graph_mac", "agent": "gnn_rnn", "mask_predictor_config.stacked_steps": 1},
]  # fmt: skip
FLAT = [{"agent": "ff", "obs_last_action": False}, {"share_parameters": False}, {"agent": "hpn_rnn"}]
FLAT += [{"learner": "ppo_learner", "action_selector": "softmax", "mixer": "none"}]
NO_TEAM = {"ddpg", "bicnet", "cnn_rnn"}  # of mac=ddpg_mac; reads images


def words(options: dict) -> str:
    return " ".join(f"{key.split('.')[-1]}={value}" for key, value in options.items())


def shorten(monkeypatch, limit: int) -> None:
    short = dataclasses.replace(get_map("3m"), limit=limit)
    monkeypatch.setattr(maps, "skirmish_map", lambda _: short)


def acting() -> list[dict]:
    """Return keys of every controller, and of every agent that it can have, in the registries."""
    names = [name for name in agents.REGISTRY.names() if name not in NO_TEAM]
    every = [{"agent": name} for name in names]
    return [*every, *FLAT, *GRAPHS]


@pytest.mark.parametrize("options", [*GRAPHS, {"agent": "attention_rnn"}], ids=words)
def test_rounds_are_those_of_the_environment_whatever_acts(options, monkeypatch):
    """Guesses may differ by the rounding of sums whose order depends on sizes; actions do not.

    Many episodes are cut off while agents live, which guess in the closing row.
    """
    shorten(monkeypatch, 24)
    both = [game("3m", runner, **options) for runner in ("parallel", "resident")]
    for _ in range(2):
        one, other = (played(plays, mac, explore=None, episodes_per_slot=2) for plays, mac in both)
        assert one.n_episodes == 2 * SLOTS
        assert_same(one, other, rounded=("recon",), ordered=False)
        if options.get("use_graph_reconstruction"):
            guesses = [e["recon" if "recon" in e else "tokens"] for e in other.episodes]
            assert torch.cat([guess.float().flatten() for guess in guesses]).unique().numel() > 3
            assert any(not torch.equal(guess[0], guess[-1]) for guess in guesses)


@pytest.mark.parametrize("options", acting(), ids=words)
def test_a_tick_reads_no_value_and_has_fixed_shapes(options, monkeypatch):
    """On the CPU, and on a simulated GPU, which also counts copies to the host; half of the episodes show all units."""
    shorten(monkeypatch, 10)
    plays, mac = game(**options)
    all_units = bool(options.get("use_graph_reconstruction"))
    rollout = played(plays, mac, explore=explore(0.3), full_obs=all_units)
    with fixed_shapes():
        plays._made[1][0].tick()
    on_simulated_gpu(monkeypatch)
    with simulated_gpu() as gpu:
        on_gpu, mac = game(device=DEVICE, **options)
        on_gpu._resident(mac, SLOTS, all_units, True)
        gpu.waits.clear()
        found = on_gpu.run(mac, explore=explore(0.3), full_obs=all_units)
        waits = dict(gpu.waits)
    assert sum(waits.values()) == 1, waits
    assert len(found.log) == len(rollout.log)


def test_every_controller_acts_on_a_device_or_is_refused():
    """`ddpg_mac` draws from a generator of the host."""
    taken = {options.get("mac", "n_mac") for options in acting()} | {"basic_mac"}
    for name in controllers.REGISTRY.names():
        config = resolve(config="qmix", env_config="skirmish", updates={"mac": name, "runner": "resident"})
        if name in taken:
            runners.REGISTRY.get("resident").check(config)
            continue
        with pytest.raises(UserError, match=f"mac={name} acts in a way of its own.* Use runner=parallel"):
            runners.REGISTRY.get("resident").check(config)


def test_an_environment_says_itself_that_devices_can_play_it():
    """Rules that a subclass changes would be lost."""

    class OtherRules(SkirmishEnv):
        pass

    assert plays_here(SkirmishEnv)
    assert not plays_here(OtherRules)
