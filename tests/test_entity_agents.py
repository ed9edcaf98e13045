"""Agents, mixers and critics of units: the order of units and absent units do not matter; enemies carry attacks."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from q_toys import INFO, LAYOUT, toy_config
from torch import Tensor
from torch.nn import functional as F

from omagd.config.env_info import EnvInfo, StateLayout
from omagd.modules.agents import REGISTRY as AGENTS
from omagd.modules.agents.agent import AgentInputs
from omagd.modules.agents.separate import SeparateAgents
from omagd.modules.critics import REGISTRY as CRITICS
from omagd.modules.mixers import REGISTRY as MIXERS
from omagd.run.training.checks import plays_any_map
from omagd.utils.errors import UserError
from omagd.utils.packing import Packing

NAMES = [name for name in AGENTS.names() if plays_any_map(AGENTS.get(name))]
VARIANTS = [*({"agent": name} for name in NAMES), *({"agent": name, "obs_last_action": False} for name in NAMES)]
PACKING = Packing((4, 2, 1))
ROWS, N, M, NORMAL, OTHERS = 7, 3, 3, 6, 2
OF_STATE = StateLayout(n_allies=N, ally_dim=4, n_enemies=M, enemy_dim=3, last_actions=NORMAL + M)
SMALL = replace(INFO, state_layout=OF_STATE, state_dim=OF_STATE.width + OTHERS)


def wide(n: int, m: int) -> EnvInfo:
    """Return the facts of a map with n agents and m enemies, with the same features."""
    layout = replace(LAYOUT, n_allies=n - 1, n_enemies=m)
    state = replace(OF_STATE, n_allies=n, n_enemies=m, last_actions=NORMAL + m)
    return replace(
        SMALL, n_agents=n, n_actions=NORMAL + m, obs_dim=layout.obs_dim, layout=layout, state_layout=state,
        state_dim=state.width + OTHERS,
    )  # fmt: skip


def agent_of(updates: dict, info: EnvInfo = SMALL, like: torch.nn.Module | None = None):
    torch.manual_seed(0)
    config = toy_config(obs_agent_id=False, **updates)
    agent = AGENTS.get(config.agent)(config, info).double()
    if like is not None:
        agent.load_state_dict(like.state_dict())
    return agent


class Seen:
    """What agents see, unit by unit, and the inputs that this makes."""

    def __init__(self) -> None:
        torch.manual_seed(1)
        self.move, self.own = torch.randn(ROWS, N, 4).double(), torch.randn(ROWS, N, 1).double()
        self.enemies, self.allies = torch.randn(ROWS, N, M, 5).double(), torch.randn(ROWS, N, N - 1, 5).double()
        self.enemies[2, :, 1] = 0  # not seen
        self.last = torch.randint(-1, NORMAL + M, (ROWS, N))

    def inputs(self) -> AgentInputs:
        parts = [self.move, self.enemies.flatten(-2), self.allies.flatten(-2), self.own]
        return AgentInputs(torch.cat(parts, dim=-1), self.last)

    def with_absent(self, n: int, m: int) -> Seen:
        """Pad with agents, allies and enemies that do not exist."""
        missing = n - N
        self.move, self.own = (F.pad(x, (0, 0, 0, missing)) for x in (self.move, self.own))
        self.enemies = F.pad(self.enemies, (0, 0, 0, m - M, 0, missing))
        self.allies = F.pad(self.allies, (0, 0, 0, missing, 0, missing))
        self.last = F.pad(self.last, (0, missing))
        return self


@pytest.mark.parametrize("updates", VARIANTS, ids=str)
def test_the_order_of_allies_changes_nothing_and_that_of_enemies_moves_the_attacks(updates):
    agent, seen = agent_of(updates), Seen()
    values = agent(seen.inputs(), PACKING)
    attacks = values[..., NORMAL:]
    assert (attacks[0, 0].unsqueeze(0) - attacks[0, 0].unsqueeze(1)).abs().sum() > 1e-3, "attacks differ"
    seen.allies = seen.allies.flip(-2)
    torch.testing.assert_close(agent(seen.inputs(), PACKING), values)
    order = torch.tensor([2, 0, 1])
    seen.enemies = seen.enemies[:, :, order]
    attacked = seen.last >= NORMAL
    seen.last[attacked] = NORMAL + order.argsort()[seen.last[attacked] - NORMAL]
    moved = agent(seen.inputs(), PACKING)
    torch.testing.assert_close(moved[..., :NORMAL], values[..., :NORMAL])
    torch.testing.assert_close(moved[..., NORMAL:], attacks[..., order])


@pytest.mark.parametrize("updates", VARIANTS, ids=str)
def test_each_unit_and_each_feature_that_is_seen_matters(updates):
    agent, seen = agent_of(updates), Seen()
    values = agent(seen.inputs(), PACKING)
    for part in (seen.move, seen.own, seen.enemies, seen.allies):
        flat = part.view(ROWS, N, -1)
        for feature in range(flat.shape[-1]):
            flat[0, 0, feature] += 1
            changed = (agent(seen.inputs(), PACKING) - values).abs()
            assert changed[0, 0].max() > 1e-9 and changed[:, 1:].max() == 0, "its own row, and no other agent's"
            flat[0, 0, feature] -= 1


@pytest.mark.parametrize("updates", VARIANTS, ids=str)
def test_absent_units_change_nothing_and_weights_fit_every_map(updates):
    agent = agent_of(updates)
    values = agent(Seen().inputs(), PACKING)
    for n, m in ((3, 5), (6, 3), (7, 9)):
        larger = agent_of(updates, wide(n, m), like=agent)
        found = larger(Seen().with_absent(n, m).inputs(), PACKING)
        assert found.shape == (ROWS, n, NORMAL + m)
        torch.testing.assert_close(found[:, :N, : NORMAL + M], values)
        absent = found[:, :N, NORMAL + M :]
        torch.testing.assert_close(absent, absent[..., :1].expand_as(absent), msg="all that are absent are alike")


@pytest.mark.parametrize("name", NAMES)
def test_agents_that_see_the_same_differ_by_their_numbers_alone(name):
    features, last = torch.randn(ROWS, 1, SMALL.obs_dim).double(), torch.zeros(ROWS, N, dtype=torch.int64)
    for numbered in (True, False):
        torch.manual_seed(0)
        agent = AGENTS.get(name)(toy_config(agent=name, obs_agent_id=numbered), SMALL).double()
        values = agent(AgentInputs(features.expand(-1, N, -1), last), PACKING)
        difference = (values - values[:, :1]).abs().max().item()
        assert difference > 1e-4 if numbered else difference < 1e-12


def healing(n: int = N, m: int = M) -> EnvInfo:
    """Return the facts of a map with n agents, of which some heal, and m enemies."""
    info = wide(n, m)
    layout = replace(info.layout, own_dim=3, healer=1)
    return replace(info, layout=layout, obs_dim=layout.obs_dim, n_actions=NORMAL + max(n, m))


class SeenByHealers(Seen):
    """Agents 1 and 2 heal; the second ally is not seen in row 4."""

    def __init__(self) -> None:
        super().__init__()
        self.own = torch.randn(ROWS, N, 3).double()
        self.own[..., 1] = torch.tensor([0.0, 1.0, 1.0])
        self.allies[4, :, 1] = 0
        self.last[0, 1:] = torch.tensor([NORMAL, NORMAL + 1])  # agent 1 has healed agent 0, agent 2 agent 1


def healed_by_hand(agent, updates: dict, seen: Seen, hidden: Tensor, row: int, i: int, j: int) -> Tensor:
    """Return the value of agent i healing agent j, from that ally's features alone, as the papers write it."""
    place = j if j < i else j - 1
    x = seen.allies[row, i, place]
    if updates.get("obs_last_action", True):
        x = torch.cat([x, (seen.last[row, i] == NORMAL + j).double().view(1)])
    h = hidden[row, i]
    if updates["agent"] == "hpn_rnn":
        g = F.relu(agent.patient.weight @ x + agent.patient.bias)
        w, b = agent.heal.weight, agent.heal.bias
        of_ally, constant = g @ w[:-1] + w[-1], g @ b[:-1] + b[-1]  # w(x) and what the bias adds
        return of_ally @ h + constant + (agent.heal_base(g))[0]
    key = agent.patient(F.relu(agent.embed_ally.weight @ x + agent.embed_ally.bias))
    return key @ agent.heal(h) / len(key) ** 0.5 + agent.heal_base(key.relu())[0]


@pytest.mark.parametrize("updates", VARIANTS, ids=str)
@pytest.mark.parametrize("m", [2, 3, 5])
def test_the_value_of_healing_an_agent_is_computed_from_that_ally(updates, m):
    info, seen = healing(m=m), SeenByHealers()
    seen.enemies = torch.randn(ROWS, N, m, 5).double()
    agent, inputs = agent_of(updates, info), seen.inputs()
    values, hidden = agent.unroll(inputs, PACKING)
    assert values.shape == (ROWS, N, NORMAL + max(N, m))
    for row in range(ROWS):
        for i in (1, 2):
            for j in range(N):
                expected = healed_by_hand(agent, updates, seen, hidden, row, i, j) if j != i else torch.tensor(0.0)
                torch.testing.assert_close(values[row, i, NORMAL + j], expected.double())
    assert (values[:, 1:, NORMAL + N :] == 0).all(), "there is no fourth agent"


@pytest.mark.parametrize("name", NAMES)
def test_healers_change_nothing_for_others_and_fit_every_map(name):
    """Who attacks plays as where nobody heals; a map of more agents changes no value; neither do separate networks."""
    updates, info = {"agent": name, "obs_last_action": False}, healing()
    agent, seen = agent_of(updates, info), SeenByHealers()
    values, inputs = agent(seen.inputs(), PACKING), seen.inputs()
    plain = agent_of(updates, replace(info, layout=replace(info.layout, healer=-1)))
    assert plain.state_dict().keys() < agent.state_dict().keys()
    plain.load_state_dict({key: agent.state_dict()[key] for key in plain.state_dict()})
    torch.testing.assert_close(plain(inputs, PACKING)[:, 0], values[:, 0])
    together = SeparateAgents(AGENTS.get(name), toy_config(**updates, share_parameters=False), info).double()
    for each in together.each:
        each.load_state_dict(agent.state_dict())
    torch.testing.assert_close(together(inputs, PACKING), values)
    larger = agent_of(updates, healing(6, 5), like=agent)
    found = larger(seen.with_absent(6, 5).inputs(), PACKING)
    torch.testing.assert_close(found[:, 0, : NORMAL + M], values[:, 0])
    torch.testing.assert_close(found[:, 1:N, : NORMAL + N], values[:, 1:])


@pytest.mark.parametrize("name", NAMES)
def test_what_does_not_fit_is_rejected(name):
    for info, updates, words in (
        (replace(SMALL, layout=None), {}, f"agent={name} needs an environment with an entity layout"),
        (SMALL, {"agent_args": {"n_heads": 3}}, "agent_args.n_heads=3: must divide rnn_hidden_dim=8"),
    ):
        if "agent_args" not in updates or name == "attention_rnn":
            with pytest.raises(UserError, match=words):
                agent_of({"agent": name, **updates}, info)


@pytest.mark.parametrize("name", [name for name in AGENTS.names() if name != "tarmac"])  # which rejects it
def test_agents_that_share_nothing_equal_the_same_networks_one_by_one(name):
    config, batch = toy_config(agent=name, share_parameters=False), Seen()
    torch.manual_seed(0)
    together = SeparateAgents(AGENTS.get(name), config, SMALL).double()
    weights = list(together.parameters())  # each one once
    assert len(weights) == N * len(list(together.each[0].parameters()))
    inputs = batch.inputs()
    values = together(inputs, PACKING)
    for i, agent in enumerate(together.each):
        own = AgentInputs(inputs.features[:, [i]], inputs.last_action[:, [i]])
        torch.testing.assert_close(values[:, [i]], agent(own, PACKING))
    stepped, _ = together.step(inputs.rows(slice(0, 3)), together.init_hidden(3))
    torch.testing.assert_close(stepped, values[:3])


class State:
    """A state, unit by unit; the second ally and the first enemy are dead."""

    def __init__(self) -> None:
        torch.manual_seed(2)
        self.allies, self.enemies = torch.randn(ROWS, N, 4).double(), torch.randn(ROWS, M, 3).double()
        self.allies[1:, 1], self.enemies[1:, 0] = 0, 0
        self.last = F.one_hot(torch.randint(NORMAL + M, (ROWS, N)), NORMAL + M).double()
        self.others, self.qs = torch.randn(ROWS, OTHERS).double(), torch.randn(ROWS, N).double()

    def flat(self) -> Tensor:
        parts = [self.allies.flatten(1), self.enemies.flatten(1), self.last.flatten(1), self.others]
        return torch.cat(parts, dim=-1)


def value_of(kind: str, info: EnvInfo = SMALL):
    """Return a function from a `State` to its value, [S], of the mixer or of the critic over sets."""
    torch.manual_seed(3)
    config = toy_config(mixer="set_qmix")
    if kind == "mixer":
        mixer = MIXERS.get("set_qmix")(config, info).double()
        return lambda state: mixer(state.qs, state.flat())
    critic = CRITICS.get("set")(config, info, 8).double()
    return lambda state: critic(AgentInputs(torch.zeros(ROWS, info.n_agents, 0), torch.zeros(0)), state.flat())


@pytest.mark.parametrize("kind", ["mixer", "critic"])
def test_values_of_states_do_not_depend_on_the_order_of_units_nor_on_absent_ones(kind):
    value, state = value_of(kind), State()
    before = value(state)
    order = torch.tensor([1, 2, 0])
    state.allies, state.last, state.qs = state.allies[:, order], state.last[:, order], state.qs[:, order]
    state.enemies = state.enemies[:, order]
    state.last[..., NORMAL:] = state.last[..., NORMAL:].roll(1, dims=-1)  # an attack, whoever its target is
    torch.testing.assert_close(value(state), before)
    state.qs[1:, 0] += 5  # of the dead ally
    torch.testing.assert_close(value(state), before)
    n, m = 6, 5
    state.allies, state.enemies = F.pad(state.allies, (0, 0, 0, n - N)), F.pad(state.enemies, (0, 0, 0, m - M))
    state.last, state.qs = F.pad(state.last, (0, m - M, 0, n - N)), F.pad(state.qs, (0, n - N), value=7.0)
    torch.testing.assert_close(value_of(kind, wide(n, m))(state), before)
    for name, values in vars(state).items():
        setattr(state, name, values[:0])
    assert value_of(kind, wide(n, m))(state).shape == (0,), "a rank without a row"


@pytest.mark.parametrize("kind", ["mixer", "critic"])
def test_values_of_states_depend_on_all_that_is_in_them(kind):
    value, before = value_of(kind), value_of(kind)(State())
    for name in ("allies", "enemies", "last", "others", "qs"):
        state = State()
        row = getattr(state, name)[0]
        row += torch.rand_like(row)
        changed = (value(state) - before).abs()
        assert (changed[0] > 1e-6) == (name != "qs" or kind == "mixer") and changed[1:].max() == 0
    state = State()  # the numbers of units count, not their means alone
    state.allies[0], state.last[0] = state.allies[0, :1], state.last[0, :1]
    alive = value(state)
    state.allies[0, 1:] = 0
    state.last[0, 1:] = 0
    assert (value(state) - alive).abs()[0] > 1e-6
    with pytest.raises(UserError, match="needs a state of units; env=skirmish has none"):
        value_of(kind, replace(SMALL, state_layout=None))


@pytest.mark.parametrize("seed", range(3))
def test_the_mixer_over_sets_never_falls_in_a_value_and_all_its_weights_matter(seed):
    torch.manual_seed(seed)
    mixer, state = MIXERS.get("set_qmix")(toy_config(mixer="set_qmix"), SMALL).double(), State()
    mixer(state.qs.requires_grad_(), state.flat()).sum().backward()
    assert (state.qs.grad[0] > 0).all() and (state.qs.grad >= 0).all()
    assert all(p.grad.abs().sum() > 0 for p in mixer.parameters())
