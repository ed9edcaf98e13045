"""Agents that read any number of units: their weights do not depend on the numbers of allies, enemies and actions.

The order of the allies does not matter to any value (invariance); when enemies change places, the values of the attacks
change places with them (equivariance). Where the targets of some agents are allies (`EntityLayout.healer`), the same
holds for allies and the values of healing them. A unit of zeros is unseen, dead or absent, and changes nothing, unless
it was the last target. So one policy plays all maps whose units have the same features, if agents do not read their
numbers (`obs_agent_id=False`).

Letters: S rows, n agents, m enemies, k allies, H hidden units, D features of a unit, J hidden units of a hypernetwork.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar, NamedTuple

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor, nn
from torch.nn import functional as F

from omagd.config.env_info import EnvInfo
from omagd.config.schema import Config, Width
from omagd.modules.agents.agent import AgentInputs, RecurrentAgent
from omagd.modules.ops import FastLinear, PackedGRU
from omagd.modules.units import present
from omagd.utils.errors import UserError


class Seen(NamedTuple):
    """What agents see. own: [S, n, D_own]. allies: [S, n, k, D_ally]. enemies: [S, n, m, D_enemy]."""

    own: Tensor
    allies: Tensor
    enemies: Tensor


class EntityAgent(RecurrentAgent):
    """Base of agents that read units one by one.

    Own features are the moves, the agent's features, its number (`obs_agent_id`) and its last action
    (`obs_last_action`), where all attacks are one action; the enemy that was attacked is marked, or the ally that was
    healed.
    """

    any_number_of_units: ClassVar[bool] = True
    attack: nn.Module  # from the hidden state to what `of_targets` reads, for enemies
    base: nn.Module
    heal: nn.Module  # the same for allies, where some heal
    heal_base: nn.Module

    def __init__(self, config: Config, info: EnvInfo) -> None:
        super().__init__(config, info)
        self.layout = info.layout_for(f"agent={config.agent}", config.env)
        self.n_actions, self.n_normal = info.n_actions, info.n_normal_actions
        self.last_action = config.obs_last_action
        self.some_heal = self.layout.healer >= 0
        self.n_numbers = info.n_agents if config.obs_agent_id else 0
        hidden = config.rnn_hidden_dim
        self.rnn = PackedGRU(hidden, hidden)
        self.normal = FastLinear(hidden, self.n_normal)

    @property
    def widths(self) -> tuple[int, int, int]:
        """Numbers of features of the agent itself, of an ally and of an enemy."""
        layout = self.layout
        last = self.n_normal + 1 if self.last_action else 0
        own = layout.move_dim + layout.own_dim + last + self.n_numbers
        of_target, healed = int(self.last_action), int(self.last_action and self.some_heal)
        return own, layout.ally_dim + healed, layout.enemy_dim + of_target

    def seen(self, inputs: AgentInputs) -> Seen:
        """Return the units that the agents' inputs describe."""
        layout, shape = self.layout, inputs.features.shape[:-1]
        m, k = layout.n_enemies, layout.n_allies
        parts = [layout.move_dim, m * layout.enemy_dim, k * layout.ally_dim, layout.own_dim]
        moves, enemies, allies, own = inputs.features.split(parts, dim=-1)
        of_self, of_allies = [moves, own], [allies.view(*shape, k, layout.ally_dim)]
        of_enemies = [enemies.view(*shape, m, layout.enemy_dim)]
        if self.last_action:
            kind = self.normal.weight.dtype
            # Which enemy was attacked is a mark of that enemy, so that the size does not depend on their number.
            last = inputs.last_action.clamp(max=self.n_normal)  # all attacks are one action
            actions = torch.arange(self.n_normal + 1, device=last.device)
            of_self.append((last.unsqueeze(-1) == actions).to(kind))
            targets = torch.arange(self.n_normal, self.n_normal + m, device=last.device)
            chosen = inputs.last_action.unsqueeze(-1)
            attacked = chosen == targets
            if self.some_heal:
                heals = self.healers(inputs)
                healed = heals & (chosen - self.n_normal == self.numbers_of_allies(last.device))
                of_allies.append(healed.to(kind).unsqueeze(-1))
                attacked &= ~heals
            of_enemies.append(attacked.to(kind).unsqueeze(-1))
        if self.n_numbers:
            of_self.append(torch.eye(self.n_numbers, dtype=own.dtype, device=own.device).expand(*shape, -1))
        return Seen(torch.cat(of_self, dim=-1), torch.cat(of_allies, dim=-1), torch.cat(of_enemies, dim=-1))

    def healers(self, inputs: AgentInputs) -> Tensor:
        """Return which agents heal, [S, n, 1] bool."""
        column = self.layout.obs_dim - self.layout.own_dim + self.layout.healer
        return inputs.features[..., column : column + 1] > 0.5

    def numbers_of_allies(self, device: torch.device) -> Tensor:
        """Return the numbers [n, k] of the agents that each agent sees as its allies: all but its own, in order."""
        place = torch.arange(self.layout.n_allies, device=device)
        own = torch.arange(self.number, self.number + self.n_agents, device=device).unsqueeze(-1)
        return place + (place >= own)

    def encode(self, inputs: AgentInputs) -> tuple[Tensor, ...]:
        """Return the GRU's input [S, n, H], and what `of_targets` reads of each enemy [S, n, m, width].

        Where some heal, then also what it reads of each ally [S, n, k, width], and which agents heal [S, n, 1].
        """
        parts = [self.encode_units(self.seen(piece)) for piece in inputs.pieces()]
        encoded = tuple(torch.cat(part) for part in zip(*parts, strict=True))
        return (*encoded, self.healers(inputs)) if self.some_heal else encoded

    @abstractmethod
    def encode_units(self, seen: Seen) -> tuple[Tensor, ...]:
        """Return what `encode` does, of some rows; not which agents heal."""

    def values(self, hidden: Tensor, *others: Tensor) -> Tensor:
        """Return the values [S, n, A]: of the normal actions from the hidden state, of others from their targets, too.

        Where some heal, action i after the normal ones means agent i for these; an agent does not heal itself.
        """
        enemies, *healing = others
        of_targets = self._of_actions(self.of_targets(enemies, self.attack(hidden), self.base))
        if healing:
            allies, healers = healing
            # Healers aim at agents by number, so values go from places in the view to numbers.
            healed = self.of_targets(allies, self.heal(hidden), self.heal_base)
            numbers = self.numbers_of_allies(hidden.device).expand(healed.shape)
            of_agents = healed.new_zeros(*healed.shape[:-1], healed.shape[-1] + 1).scatter(-1, numbers, healed)
            of_targets = torch.where(healers, self._of_actions(of_agents), of_targets)
        return torch.cat([self.normal(hidden), of_targets], dim=-1)

    def _of_actions(self, values: Tensor) -> Tensor:
        """Return values [S, n, A - normal actions] from those of targets: there may be more or fewer of these."""
        # Maps of a set share one number of actions; what a map lacks is never available.
        missing = self.n_actions - self.n_normal - values.shape[-1]
        return F.pad(values, (0, missing)) if missing > 0 else values[..., : self.n_actions - self.n_normal]

    @staticmethod
    @abstractmethod
    def of_targets(targets: Tensor, read: Tensor, base: nn.Module) -> Tensor:
        """Return the values of targets [S, n, t].

        targets: [S, n, t, width], what `encode` returns of them. read: [S, n, ...], what the agent's hidden state asks
        of them. base: of a target's value that does not depend on the hidden state.
        """


class HyperEmbedding(nn.Module):
    """The sum over units of W(x) x + b(x), where W is a hypernetwork of the unit's features.

        W(x) x = sum_j a_j(x) W_j x,   a(x) = [relu(A x + c), 1]

    W is linear in a, so the sum over units is W applied to the sum of the outer products a x^T: large products are made
    once for each agent, and not for each unit. b(x) is part of it, since x is extended by a 1 for units that are not
    zeros.

    Args:
        dim: D. hyper: J. out: width of the result.
    """

    def __init__(self, dim: int, hyper: int, out: int) -> None:
        super().__init__()
        self.hyper = FastLinear(dim, hyper)
        self.weight = FastLinear((hyper + 1) * (dim + 1), out, bias=False)

    def forward(self, units: Tensor) -> Tensor:
        """Return [..., out] from units [..., k, D]."""
        # The 1 behind a unit's features carries the bias; units of zeros have none, and add nothing.
        there = present(units).to(units.dtype)
        gates = torch.cat([self.hyper(units).relu(), there], dim=-1)
        # Sum over units of a(x) [x | 1]^T: symmetric, so the order of units does not matter (HPN, section 4).
        products = gates.transpose(-1, -2) @ torch.cat([units, there], dim=-1)
        embedded: Tensor = self.weight(products.flatten(-2))
        return embedded


class HPNArgs(BaseModel):
    """`agent_args` of `hpn_rnn`."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    hyper_dim: Width = 32  # hidden width of the hypernetworks (J)


class HPNAgent(EntityAgent):
    """Hyper Policy Network (Hao et al. 2023, arXiv:2203.05285): a hypernetwork for each kind of unit.

    The GRU reads relu(W_own x_own + sum over allies W_a(x) x + sum over enemies W_e(x) x). The value of attacking enemy
    i is w(x_i) h + v(x_i), where w and v are hypernetworks of the enemy's features; for healing an ally, of its own.
    """

    args_model: ClassVar[type[BaseModel]] = HPNArgs

    def __init__(self, config: Config, info: EnvInfo) -> None:
        super().__init__(config, info)
        hyper, hidden = HPNArgs.model_validate(config.agent_args).hyper_dim, config.rnn_hidden_dim
        own, ally, enemy = self.widths
        self.own = FastLinear(own, hidden)
        self.of_allies = HyperEmbedding(ally, hyper, hidden)
        self.of_enemies = HyperEmbedding(enemy, hyper, hidden)
        self.target = FastLinear(enemy, hyper)
        self.attack = FastLinear(hidden, hyper + 1)
        self.base = nn.Linear(hyper, 1)
        if self.some_heal:
            self.patient = FastLinear(ally, hyper)
            self.heal = FastLinear(hidden, hyper + 1)
            self.heal_base = nn.Linear(hyper, 1)

    def encode_units(self, seen: Seen) -> tuple[Tensor, ...]:
        """Return the GRU's input [S, n, H], and g of each enemy [S, n, m, J] (and of each ally [S, n, k, J])."""
        # HPN, section 4: sums over units are the same in any order, so values of normal actions are, too.
        embedded = self.own(seen.own) + self.of_allies(seen.allies) + self.of_enemies(seen.enemies)
        patients = (self.patient(seen.allies).relu(),) if self.some_heal else ()
        return embedded.relu(), self.target(seen.enemies).relu(), *patients

    @staticmethod
    def of_targets(targets: Tensor, read: Tensor, base: nn.Module) -> Tensor:
        """Return w(x_i) h + v(x_i), [S, n, t], from g(x_i), and W h with w_0 h behind it.

        w(x_i) = W^T g(x_i) + w_0, and g(x_i)^T (W h) + w_0 h costs less than w(x_i)^T h: W h is made once.
        """
        weights, constant = read.split([targets.shape[-1], 1], dim=-1)
        # One value from each enemy's own embedding: when two enemies change places, so do their values.
        values: Tensor = (targets @ weights.unsqueeze(-1)).squeeze(-1) + constant + base(targets).squeeze(-1)
        return values


class AttentionArgs(BaseModel):
    """`agent_args` of `attention_rnn`."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    n_heads: int = Field(default=4, ge=1)  # attention heads; divides rnn_hidden_dim


class AttentionAgent(EntityAgent):
    """The agent attends to the units that it sees (as the agents of REFIL, Iqbal et al. 2021, arXiv:2006.04222).

    Its query comes from its own features; keys and values from all units, its own included. The value of attacking
    enemy i is the scaled product of that enemy's key for targets and the hidden state, plus a value of the enemy; for
    healing an ally the same with weights of its own.
    """

    args_model: ClassVar[type[BaseModel]] = AttentionArgs

    def __init__(self, config: Config, info: EnvInfo) -> None:
        super().__init__(config, info)
        self.n_heads, hidden = AttentionArgs.model_validate(config.agent_args).n_heads, config.rnn_hidden_dim
        if hidden % self.n_heads:
            raise UserError(f"agent_args.n_heads={self.n_heads}: must divide rnn_hidden_dim={hidden}")
        own, ally, enemy = self.widths
        self.embed_self = FastLinear(own, hidden)
        self.embed_ally = FastLinear(ally, hidden)
        self.embed_enemy = FastLinear(enemy, hidden)
        self.query = FastLinear(hidden, hidden, bias=False)
        self.key_value = FastLinear(hidden, 2 * hidden, bias=False)
        self.out = FastLinear(hidden, hidden)
        self.target = FastLinear(hidden, hidden)
        self.attack = FastLinear(hidden, hidden)
        self.base = nn.Linear(hidden, 1)
        if self.some_heal:
            self.patient = FastLinear(hidden, hidden)
            self.heal = FastLinear(hidden, hidden)
            self.heal_base = nn.Linear(hidden, 1)

    def encode_units(self, seen: Seen) -> tuple[Tensor, ...]:
        """Return the GRU's input [S, n, H], and the enemies' keys for targets [S, n, m, H] (and the allies')."""
        own, enemies = self.embed_self(seen.own).relu(), self.embed_enemy(seen.enemies).relu()
        allies = self.embed_ally(seen.allies).relu()
        units = torch.cat([own.unsqueeze(-2), allies, enemies], dim=-2)
        # A unit of zeros has an embedding too (the bias), but nobody attends to it.
        there = torch.cat([present(part) for part in (seen.allies, seen.enemies)], dim=-2).squeeze(-1)
        there = F.pad(there, (1, 0), value=True)  # an agent always attends to itself
        attended = self._attend(own.flatten(0, 1), units.flatten(0, 1), there.flatten(0, 1)).view_as(own)
        patients = (self.patient(allies),) if self.some_heal else ()
        return (own + self.out(attended)).relu(), self.target(enemies), *patients

    def _attend(self, own: Tensor, units: Tensor, there: Tensor) -> Tensor:
        """Return [R, H] for agents' own embeddings [R, H], units [R, N, H] and masks [R, N] of units that exist."""
        rows, heads, width = own.shape[0], self.n_heads, own.shape[-1] // self.n_heads
        # Attention (Vaswani et al. 2017, eq. 1) in which only the agent itself asks: one query over its units, O(N),
        # where REFIL's full attention is O(N²).
        query = self.query(own).view(rows, 1, heads, width).transpose(1, 2)
        both = self.key_value(units).view(rows, units.shape[1], 2 * heads, width)
        keys, values = both.transpose(1, 2).chunk(2, dim=1)
        mask = there.view(rows, 1, 1, units.shape[1])
        return F.scaled_dot_product_attention(query, keys, values, attn_mask=mask).reshape(own.shape)

    @staticmethod
    def of_targets(targets: Tensor, read: Tensor, base: nn.Module) -> Tensor:
        """Return the scaled product of each target's key and what the agent asks, plus a value of the target."""
        # The score of attention without its softmax: how much the memory wants this target.
        product = (targets @ read.unsqueeze(-1)).squeeze(-1)
        values: Tensor = product * targets.shape[-1] ** -0.5 + base(targets.relu()).squeeze(-1)
        return values
