"""What agents are told of the units that they do not see (`belief_inputs`): against loops, and as learners read it."""

from __future__ import annotations

import copy
import math
from typing import Any

import numpy as np
import pytest
import torch
from graph_toys import INFO, LAYOUT, believing, noting, toy_config, toy_episodes

from omagd.config.loading import resolve
from omagd.controllers.types import Exploration, Tick
from omagd.envs.factory import make_env
from omagd.envs.protocol import Observation
from omagd.modules.agents.agent import AgentInputs, Marks
from omagd.modules.graph_reconstructers import check_beliefs
from omagd.modules.graph_reconstructers.graphs import obs_to_nodes
from omagd.run.cli.preflight import preflight
from omagd.run.training.build import build_mac, new_predictor, new_tokenizer
from omagd.run.training.stages.base import PretrainedModules
from omagd.runners import REGISTRY as RUNNERS
from omagd.runners.starts import EpisodeSeeds
from omagd.utils.errors import UserError
from omagd.utils.packing import pack_episodes

torch.set_num_threads(1)
CPU, X, Y = torch.device("cpu"), *LAYOUT.position


def acted(reconstructor: Any, episode: Any) -> torch.Tensor:
    """Act through an episode in slot 1, while slot 0 waits; return the field `belief` of its rows."""
    out = []
    reconstructor.begin(2)
    for t, obs in enumerate(episode["obs"]):
        action = episode["actions"][t - 1] if t else torch.full((INFO.n_agents,), -1)
        given = (torch.stack([torch.rand_like(obs), obs]), np.full(2, t), np.array([False, True]))
        told = reconstructor.step(*given, action.expand(2, -1)).fields["belief"]
        assert told.dtype == torch.float16 and not told[0].any()
        out.append(told[1])
    return torch.stack(out)


def by_tracker(stage: Any, batch: Any) -> dict[tuple[int, int, int], tuple[float, float]]:
    """Return the probability of being alive and the spread of each missing node (row, agent, node), as trained."""
    missing, belief = stage.beliefs(batch)
    spread = ((belief.spread[:, X] ** 2 + belief.spread[:, Y] ** 2) / 2) ** 0.5
    pairs = zip((1 - belief.p_dead).tolist(), spread.tolist(), strict=True)
    return dict(zip(map(tuple, torch.nonzero(missing).tolist()), pairs, strict=True))


def by_codes(stage: Any, batch: Any) -> dict[tuple[int, int, int], tuple[float, float]]:
    """The same of the masked predictor: from its distribution over codes and ABSENT."""
    sample, table = stage.sample(batch, stage.graphs(batch)), stage.predictor.table
    shares = stage.predictor.eval()(sample.frames, sample.masked).softmax(-1)
    found = {}
    for (frame, node), share in zip(torch.nonzero(sample.masked).tolist(), shares.double(), strict=True):
        living = share[:-1] / share[:-1].sum()
        variance = 0.0
        for column in (X, Y):
            mean = sum(p * value for p, value in zip(living.tolist(), table[:, column].tolist(), strict=True))
            variance += float((living * (table[:, column].double() - mean) ** 2).sum()) / 2
        found[int(sample.rows[frame]), int(sample.agents[frame]), node] = 1 - float(share[-1]), math.sqrt(variance)
    return found


@pytest.mark.parametrize("changes", [
    {"kind": "tracker"}, {}, {"decode": "argmax"}, {"use_gru": True}, {"last_seen": False},
], ids=str)  # fmt: skip
def test_agents_are_told_age_certainty_and_spread(changes: dict[str, Any]) -> None:
    (stage, reconstructor), episodes = believing(**changes), toy_episodes(6, seed=21, apart=True)
    batch = pack_episodes([{**e, "told": acted(reconstructor, e)} for e in episodes])
    believed = (by_tracker if changes.get("kind") else by_codes)(stage, batch)
    classes = set()
    for row, (step, number) in enumerate(zip(batch.packing.step.tolist(), batch.packing.episode.tolist(), strict=True)):
        obs = episodes[batch.sample_index[number]]["obs"]
        shown, living = obs_to_nodes(obs, LAYOUT).any(-1), obs.any(-1)
        for agent in range(INFO.n_agents):
            for node in range(LAYOUT.n_nodes):
                got = batch["told"][row, agent, node].tolist()
                if not living[step, agent]:
                    assert got == [0, 0, 0, 0]
                    classes.add("dead")
                    continue
                if shown[step, agent, node]:
                    assert got == [0, 0, 0, 1]
                    classes.add("seen")
                    continue
                sights = [t for t in range(step) if living[t, agent] and shown[t, agent, node]]
                age = step - sights[-1] if sights else -1
                assert got[1] == pytest.approx(math.tanh(age / 8) if sights else 0, abs=1e-3)
                assert got[2] == (not sights)
                classes.add(min(age, 2))
                if (row, agent, node) in believed:  # not of closing rows
                    alive, spread = believed.pop((row, agent, node))
                    assert got[3] == pytest.approx(alive, abs=2e-3)
                    assert got[0] == pytest.approx(spread, abs=5e-3)
    assert not believed and classes == {"dead", "seen", -1, 1, 2}
    assert batch["told"][..., 0].unique().numel() > 20


@pytest.mark.parametrize(("guesses", "beliefs"), [(True, True), (True, False), (False, True)])
def test_marks_follow_the_features_node_by_node(guesses: bool, beliefs: bool) -> None:
    """Saved agents depend on this order."""
    marks = Marks(toy_config(mark_guesses=guesses, belief_inputs=beliefs), INFO)
    features, told = torch.rand(2, INFO.n_agents, INFO.obs_dim), torch.rand(2, INFO.n_agents, LAYOUT.n_nodes, 4)
    guessed, last = torch.rand(told.shape[:-1]) < 0.5, torch.zeros(2, INFO.n_agents, dtype=torch.int64)
    flat = marks.flat(AgentInputs(features, last, guessed, told))
    blind = marks.flat(AgentInputs(features, last))  # without reconstruction
    assert flat.shape == blind.shape == (2, INFO.n_agents, INFO.obs_dim + marks.n)
    for row in range(2):
        for agent in range(INFO.n_agents):
            wanted = features[row, agent].tolist()
            for node in range(LAYOUT.n_nodes):
                wanted += [float(guessed[row, agent, node])] * guesses
                wanted += told[row, agent, node].tolist() * beliefs
            assert flat[row, agent].tolist() == wanted
            assert blind[row, agent].tolist() == features[row, agent].tolist() + [0] * marks.n


def marks_of(inputs: Any) -> set[bytes]:
    """Return what agents read of guesses and of beliefs, row by row."""
    rows = zip(inputs.guessed, inputs.belief, strict=True)
    return {guessed.numpy().tobytes() + belief.numpy().tobytes() for guessed, belief in rows}


def collected(runner: str, **changes: Any) -> tuple[Any, Any, set[bytes]]:
    """Return a controller, episodes that it has played, and the marks on which it acted, row by row."""
    values = {"env_args.map_name": "3m_mixed_sight6", "batch_size_run": 3, "rnn_hidden_dim": 8, "gnn_hidden_dim": 8}
    config = resolve("omagd_small", "skirmish", {**values, "belief_inputs": True, "runner": runner, **changes})
    env = make_env("skirmish", {"map_name": "3m_mixed_sight6"}, 3, processes=False)
    modules = PretrainedModules(new_tokenizer(config, env.info, CPU), new_predictor(config, env.info, CPU))
    if changes.get("mask_predictor_config.kind") != "tracker":
        modules.predictor.bind(modules.tokenizer.table())
    if changes.get("mask_predictor_config.kind") == "tracker":  # an untrained one reads no actions
        for value in modules.predictor.parameters():
            torch.nn.init.normal_(value, std=0.2, generator=torch.Generator().manual_seed(len(value)))
    mac: Any = build_mac(config, env.info, CPU, modules)
    told = noting(mac, marks_of)
    plays, episodes = RUNNERS.get(runner)(env, config, env.info, EpisodeSeeds(1, "train")), []
    while len(episodes) < 3:
        explore = Exploration(1.0, np.random.default_rng(0))
        episodes += plays.collect(mac, explore=explore, full_obs=mac.wants_full_obs).episodes
    env.close()
    return mac, episodes, told


@pytest.mark.parametrize("changes", [
    {"mask_predictor_config.kind": "tracker"},
    {"mac": "gnn_graph_mac", "agent": "gnn_rnn", "mark_guesses": True},
], ids=str)  # fmt: skip
@pytest.mark.parametrize("runner", ["parallel", "stream"])
def test_learners_read_the_beliefs_on_which_agents_acted(runner: str, changes: dict[str, Any]) -> None:
    mac, episodes, told = collected(runner, **changes)
    assert {name: (x.dtype, tuple(x.shape[1:])) for name, x in episodes[0].items() if name in ("recon", "belief")} == (
        mac.extra_fields(resolve("omagd_small", "skirmish", {"belief_inputs": True, **changes}), mac.info)
    )
    batch = pack_episodes(episodes)
    inputs = mac.inputs(batch)
    assert marks_of(inputs) <= told
    assert torch.equal(inputs.belief.half(), batch["belief"]) and (inputs.belief[..., 0] > 0).any()
    values = mac.agent(inputs, batch.packing)
    values.sum().backward()
    assert values.shape == batch["avail_actions"].shape


@pytest.mark.parametrize("runner", ["parallel", "stream"])
def test_agents_tell_the_predictor_what_they_have_done(runner: str) -> None:
    mac, episodes, _ = collected(runner, **{"mask_predictor_config.kind": "tracker"})
    ours, n = mac.reconstructor, mac.info.n_agents
    nothing, differ = torch.full((n,), -1), 0.0
    for episode in episodes:
        played = episode["actions"].flatten(1)
        made = []
        for actions in ([nothing, *played], [nothing] * (len(played) + 1)):
            ours.begin(1)
            rows = zip(episode["obs"], actions, strict=False)
            steps = [ours.step(obs[None], torch.tensor([t]), None, last[None]) for t, (obs, last) in enumerate(rows)]
            made.append(torch.stack([each.fields["recon"][0] for each in steps]).float())
        torch.testing.assert_close(made[0], episode["recon"].float(), rtol=2e-3, atol=2e-3)
        differ = max(differ, float((made[0] - made[1]).abs().max()))
    assert differ > 0.05


def test_memories_of_a_predictor_are_part_of_a_controllers_snapshot() -> None:
    mac, episodes, _ = collected("parallel", **{"mask_predictor_config.kind": "tracker"})
    del mac._build_inputs  # which notes
    other, rows = copy.deepcopy(mac), next(episode["obs"] for episode in episodes if len(episode["obs"]) > 12)
    for one in (mac, other):
        one.begin(1)
    for t, obs in enumerate(rows[:12]):
        if t == 6:
            other.load_snapshot(mac.snapshot())
        seen = Observation(obs[None].numpy(), np.zeros((1, 1)), np.ones((1, mac.info.n_agents, 1), bool))
        tick = Tick(seen, np.array([t]), np.ones(1, bool))
        made = [one._build_inputs(tick)[0] for one in ((mac, other) if t >= 6 else (mac,))]
        assert torch.equal(made[0].features, made[-1].features) and torch.equal(made[0].belief, made[-1].belief)


def test_what_cannot_tell_how_sure_it_is_is_rejected() -> None:
    believing = {"belief_inputs": True, "use_graph_reconstruction": False}
    with pytest.raises(UserError, match="fill_unseen=last_seen does not say how sure it is. Use belief_inputs=False"):
        resolve("omagd_small", "skirmish", {**believing, "fill_unseen": "last_seen"})
    with pytest.raises(UserError, match="runner=resident: .* not with belief_inputs=True. Use runner=parallel"):
        preflight(resolve("omagd_small", "skirmish", {"belief_inputs": True, "runner": "resident"}))
    with pytest.raises(UserError, match="kind=map_constant does not say how sure it is"):
        preflight(resolve("fog_map_constant", "skirmish", {"belief_inputs": True}))
    check_beliefs(toy_config(belief_inputs=True))
    check_beliefs(resolve("fog_map_constant", "skirmish", {}))
