"""What agents read of the units that they do not see: marks of guesses, and what predictors read and remember."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch

from omagd.config.loading import resolve
from omagd.config.schema import Config
from omagd.controllers.types import Exploration, Tick
from omagd.envs.factory import make_env
from omagd.envs.protocol import Observation
from omagd.run.training.build import build_mac, new_predictor, new_tokenizer
from omagd.run.training.stages.base import PretrainedModules
from omagd.runners import REGISTRY as RUNNERS
from omagd.utils.packing import pack_episodes
from omagd.utils.seeding import EpisodeSeeds

CPU = torch.device("cpu")


def marks_of(inputs: Any) -> set[bytes]:
    """Return what agents read, row by row."""
    guessed = inputs.features if inputs.guessed is None else inputs.guessed
    rows = zip(inputs.features, guessed, strict=True)
    return {features.numpy().tobytes() + guessed.numpy().tobytes() for features, guessed in rows}


def collected(runner: str, preset: str = "omagd_small", **changes: Any) -> tuple[Config, Any, Any, set[bytes]]:
    """Return a configuration, its controller, episodes that it has played, and what agents read, row by row."""
    values = {"env_args.map_name": "3m_mixed_sight6", "batch_size_run": 3, "rnn_hidden_dim": 8, "gnn_hidden_dim": 8}
    config = resolve(preset, "skirmish", {**values, "runner": runner, **changes})
    env, modules = make_env("skirmish", {"map_name": config.map_name}, 3, processes=False), PretrainedModules()
    if config.use_graph_reconstruction:
        modules = PretrainedModules(new_tokenizer(config, env.info, CPU), new_predictor(config, env.info, CPU))
        modules.predictor.bind(modules.tokenizer.table())
    mac: Any = build_mac(config, env.info, CPU, modules)
    read, build = set[bytes](), mac._build_inputs

    def noted(tick: Any) -> Any:
        inputs, extras = build(tick)
        read.update(marks_of(inputs))
        return inputs, extras

    mac._build_inputs = noted
    plays, episodes = RUNNERS.get(runner)(env, config, env.info, EpisodeSeeds(1, "train")), []
    while len(episodes) < 3:
        explore = Exploration(1.0, np.random.default_rng(0))
        episodes += plays.collect(mac, explore=explore, full_obs=mac.wants_full_obs).episodes
    env.close()
    return config, mac, episodes, read


@pytest.mark.parametrize("changes", [
    {},
    {"mac": "gnn_graph_mac", "agent": "gnn_rnn"},
    {"preset": "qmix", "use_team_obs": True, "env_args.map_name": "3s_vs_5z"},
], ids=str)  # fmt: skip
@pytest.mark.parametrize("runner", ["parallel", "stream"])
def test_learners_read_what_agents_acted_on(runner: str, changes: dict[str, Any]) -> None:
    config, mac, episodes, read = collected(runner, **changes)
    assert {name: (x.dtype, tuple(x.shape[1:])) for name, x in episodes[0].items() if name == "recon"} == (
        mac.extra_fields(config, mac.info)
    )
    batch = pack_episodes(episodes)
    inputs = mac.inputs(batch)
    assert marks_of(inputs) <= read
    if config.use_team_obs:
        assert not any(torch.equal(inputs.features, batch[name]) for name in ("obs", "full_obs"))
    else:
        assert inputs.guessed.any()
    values = mac.agent(inputs, batch.packing)
    values.sum().backward()
    assert values.shape == batch["avail_actions"].shape


def test_memories_of_a_predictor_are_part_of_a_controllers_snapshot() -> None:
    """Without dropout, which only trains."""
    dropout = {"mask_predictor_config.dropout": 0.5, "tokenizer_config.dropout": 0.5}
    _, mac, episodes, _ = collected("parallel", **dropout)
    del mac._build_inputs  # which notes
    draws = torch.Generator().manual_seed(1)
    for weight in mac.reconstructor.predictor.parameters():
        weight.data += 0.3 * torch.randn(weight.shape, generator=draws)
    other = copy.deepcopy(mac)
    for episode in episodes:
        mac.begin(1)
        for t, obs in enumerate(episode["obs"]):
            other.begin(1)
            other.load_snapshot(mac.snapshot())
            seen = Observation(obs[None].numpy(), np.zeros((1, 1)), np.ones((1, mac.info.n_agents, 1), bool))
            tick = Tick(seen, np.array([t]), np.ones(1, bool))
            one, two = (each._build_inputs(tick)[0].features for each in (mac, other))
            assert torch.equal(one, two)
