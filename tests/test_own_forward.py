"""What acts is what trains: fused and compiled forms are for exactly the classes that they were written for."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from graph_toys import INFO, LAYOUT, graph_learner, toy_episodes
from q_toys import INFO as Q_INFO
from q_toys import random_episode
from q_toys import toy_config as q_config
from torch import nn

from omagd.modules import kernels
from omagd.modules.agents import REGISTRY as AGENTS
from omagd.modules.agents.agent import AgentInputs, RecurrentAgent
from omagd.modules.agents.ff_agent import FFAgent
from omagd.modules.graph_reconstructers.graphs import feature_mask, obs_to_nodes
from omagd.modules.graph_reconstructers.reconstructor import Reconstructor
from omagd.modules.graph_reconstructers.token_reconstructor import TokenReconstructor
from omagd.modules.graph_reconstructers.tokenizer import Quantized, Tokenizer
from omagd.modules.mixers import REGISTRY as MIXERS
from omagd.modules.mixers.mixer import MixerInputs, mix
from omagd.modules.ops import FastLinear, PackedGRU
from omagd.resident.reconstruction import ResidentReconstruction
from omagd.utils.errors import UserError
from omagd.utils.packing import last_actions, pack_episodes


def scaled(kind: type[Any], method: str = "forward", by: float = -2.0) -> type[Any]:
    """Return a subclass in which a method returns its result times `by`."""

    def changed(self: Any, *given: Any, **named: Any) -> Any:
        return getattr(super(made, self), method)(*given, **named) * by

    made = type(f"My{kind.__name__}", (kind,), {method: changed})
    return made


class LastCode(Tokenizer):
    """Gives every node the last code but one, by its forward alone."""

    def forward(self, nodes: torch.Tensor) -> Quantized:
        return super().forward(nodes)._replace(ids=torch.full(nodes.shape[:-1], self.n_codes - 2))


def same_guesses(acted: torch.Tensor, missing: torch.Tensor, believed: torch.Tensor) -> None:
    """Check the guesses in observations, which are rounded to float16, against features [M, D] of missing nodes."""
    real = feature_mask(LAYOUT)[missing.nonzero()[:, 2]]
    torch.testing.assert_close(obs_to_nodes(acted, LAYOUT)[missing], believed * real, atol=2e-3, rtol=2e-3)


def acts_as_it_believes(stage: Any, reconstructor: Reconstructor, episodes: list[Any]) -> torch.Tensor:
    """Play episodes one by one; check what was acted on; return what stage 2 believes."""
    played = []
    for episode in episodes:
        reconstructor.begin(1)
        actions = torch.cat([torch.full_like(episode["actions"][:1], -1), episode["actions"][:-1]])
        given = zip(episode["obs"].split(1), torch.arange(len(actions)).split(1), actions.split(1), strict=True)
        made = [reconstructor.step(obs, step, None, action).obs for obs, step, action in given]
        played.append({**episode, "acted": torch.cat(made)})
    batch = pack_episodes(played)
    missing, belief = stage.beliefs(batch)
    same_guesses(batch["acted"], missing, belief.features)
    return belief.features


def change(part: str, tokenizer: Any, predictor: Any) -> None:
    """Let a module, or a part of it, compute something else than the class in this package."""
    if part == "tokenizer":
        tokenizer.__class__ = LastCode
    elif part:
        module = predictor if part == "predictor" else predictor.blocks[1].merge
        module.__class__ = scaled(type(module))


@pytest.mark.parametrize("part", ["", "predictor", "linear", "tokenizer"])
def test_a_predictor_acts_with_the_network_that_was_trained(part: str) -> None:
    stage = graph_learner("stage2", torch.float32)
    tokenizer, predictor = stage.tokenizer, stage.predictor.eval()
    for weight in predictor.parameters():
        weight.data += 0.3 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(len(weight)))
    episodes = toy_episodes(6, seed=20)
    before = stage.beliefs(pack_episodes(episodes))[1].features
    change(part, tokenizer, predictor)
    reconstructor = TokenReconstructor(tokenizer, predictor, stage.config, INFO)
    believed = acts_as_it_believes(stage, reconstructor, episodes)
    assert torch.allclose(believed, before, atol=1e-5) == (not part)


def test_a_device_rejects_a_predictor_that_it_would_compute_in_another_way() -> None:
    stage = graph_learner("stage2", torch.float32)
    change("predictor", stage.tokenizer, stage.predictor)
    reconstructor = TokenReconstructor(stage.tokenizer, stage.predictor, stage.config, INFO)
    with pytest.raises(UserError, match="^runner=resident: .*Use runner=parallel"):
        ResidentReconstruction(reconstructor, 2)


def test_who_trains_by_a_forward_of_its_own_and_acts_by_an_inherited_step_is_rejected() -> None:
    for name in AGENTS.names():
        kind = AGENTS.get(name)
        if issubclass(kind, RecurrentAgent):
            with pytest.raises(UserError, match=f"^My{kind.__name__}: .*Override encode or values, .*or step too"):
                scaled(kind)(q_config(agent=name), Q_INFO)
    with pytest.raises(UserError, match=r"^MyPackedGRU: "):
        scaled(PackedGRU)(4, 4)
    both = type("Both", (scaled(AGENTS.get("n_rnn"), "step"),), {"forward": RecurrentAgent.forward, "step": None})
    assert both(q_config(agent="n_rnn"), Q_INFO).fc2 is not None


def test_a_policy_with_a_forward_of_its_own_is_not_frozen_to_layers() -> None:
    config = q_config(agent="ff", obs_last_action=False, obs_agent_id=False)
    assert FFAgent.frozen_needs(config) == () and "forward of its own" in scaled(FFAgent).frozen_needs(config)[0]
    agent = FFAgent(config, Q_INFO)
    assert len(agent.layers()) == 3
    agent.trunk.fc2.__class__ = scaled(FastLinear)
    with pytest.raises(ValueError, match="more than layers"):
        agent.layers()


def own_layers(module: nn.Module, hook: str = "") -> int:
    """Let every linear layer compute something of its own, by its class or by a hook; return their number."""
    layers = [part for part in module.modules() if isinstance(part, nn.Linear)]
    for layer in layers:
        if hook:
            getattr(layer, hook)(lambda module, given, *out: (out or given)[0] * -2)
        else:
            layer.__class__ = scaled(type(layer))
    return len(layers)


@pytest.mark.parametrize("name", AGENTS.names())
def test_kernels_learn_what_an_agent_acts_with(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(kernels, "SMALL", 0)
    batch = pack_episodes([random_episode(i, k) for i, k in enumerate((5, 3, 1))])
    inputs = AgentInputs(batch["obs"].float(), last_actions(batch["actions"], batch.packing))
    shown = {"obs_last_action": name != "ddpg", "obs_agent_id": name != "ddpg"}
    agent = AGENTS.get(name)(q_config(agent=name, **shown), Q_INFO)
    before = agent(inputs, batch.packing)
    assert own_layers(agent) > 1
    learned = agent(inputs, batch.packing)
    first = inputs.rows(slice(0, 3))
    with torch.inference_mode():
        acted, _ = agent.step(first, agent.init_hidden(3))
    torch.testing.assert_close(acted, learned[:3].detach(), atol=1e-4, rtol=1e-4)
    assert not torch.allclose(learned, before, atol=1e-3)


@pytest.mark.parametrize("hook", ["", "register_forward_hook", "register_forward_pre_hook"])
@pytest.mark.parametrize("name", MIXERS.names())
def test_mixers_call_layers_that_compute_something_else(monkeypatch: pytest.MonkeyPatch, name: str, hook: str) -> None:
    mixer = MIXERS.get(name)(q_config(mixer=name), Q_INFO)
    own_layers(mixer, hook)
    q = torch.randn(9, Q_INFO.n_agents, Q_INFO.n_actions)
    inputs = MixerInputs(
        q, torch.zeros(q.shape[:2], dtype=torch.int64), torch.ones_like(q), torch.randn(9, Q_INFO.state_dim)
    )
    made = []
    for small in (0, math.inf):
        monkeypatch.setattr(kernels, "SMALL", small)
        made.append(mix(mixer, inputs))
    torch.testing.assert_close(*made)
