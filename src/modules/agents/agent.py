"""Agents: their interface, their inputs, their first layer, recurrent ones, and a network for each agent.

Shapes: S packed rows (battle slots B when acting), n agents, A actions, H hidden units, N nodes of an agent's graph.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from omagd.config.env_info import EnvInfo
from omagd.config.schema import Config
from omagd.modules.graph_reconstructers import n_inferred
from omagd.modules.ops import FastLinear, PackedGRU, fast_linear, is_only, lookup_relu
from omagd.utils.packing import Packing
from omagd.utils.registry import require_step

STEPS_AT_ONCE = 10  # time steps whose activations gradient checkpointing recomputes together
AT_ONCE = 512  # agents' rows whose units or graphs pass together, so that they stay in the cache
HEAD_GAIN = 0.01  # as in PyMARL2: values start near zero


@dataclass(frozen=True)
class AgentInputs:
    """Inputs of agents, row by row: packed steps (S) in learning, battle slots (B) in acting.

    Args:
        features: [S, n, obs_dim], flat observations (seen, reconstructed or full), in the agent's float type.
        last_action: [S, n] int64, -1 at the first step of an episode. Of continuous actions [S, n, d] floats, in half
            widths of their bounds, 0 at the first step.
        guessed: [S, n, N] bool, nodes whose features are guesses; None without reconstruction.
        inferred: [S, n, E], what agents infer that others observe, for kinds of predictors that do; else None.
        kept: what agents have computed of these inputs alone; trained and target networks share it.
    """

    features: Tensor
    last_action: Tensor
    guessed: Tensor | None = None
    inferred: Tensor | None = None
    kept: dict[object, Any] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def blank(cls, n_rows: int, info: EnvInfo, like: Tensor) -> AgentInputs:
        """Return inputs of zeros with the float type and device of `like`."""
        features = like.new_zeros(n_rows, info.n_agents, info.obs_dim)
        return cls(features, no_action(info, n_rows, like.device))

    def read(self, n_inferred: int) -> Tensor:
        """Return the features [S, n, d], followed by the inferred numbers, so many; zeros without reconstruction."""
        if not n_inferred:
            return self.features
        nothing = self.features.new_zeros(*self.features.shape[:-1], n_inferred)
        return torch.cat([self.features, nothing if self.inferred is None else self.inferred], dim=-1)

    def rows(self, chosen: Tensor | slice) -> AgentInputs:
        """Return the inputs of the `chosen` row numbers."""
        if isinstance(chosen, Tensor):
            return self._of_parts(lambda part: part.index_select(0, chosen))
        return self._of_parts(lambda part: part[chosen])

    def pieces(self) -> list[AgentInputs]:
        """Return the inputs in pieces whose units or nodes fit the cache; as a whole in a graph that is exported."""
        rows = max(1, AT_ONCE // self.last_action.shape[1])
        starts = range(0, 0 if torch.compiler.is_compiling() else len(self.features), rows)
        return [self.rows(slice(i, i + rows)) for i in starts] or [self]

    def agent(self, number: int) -> AgentInputs:
        """Return the inputs of one agent, [S, 1, ...]."""
        return self._of_parts(lambda part: part[:, number : number + 1])

    def _of_parts(self, choose: Callable[[Tensor], Tensor]) -> AgentInputs:
        parts = {each.name: getattr(self, each.name) for each in fields(self)}
        chosen = {name: choose(part) for name, part in parts.items() if isinstance(part, Tensor)}
        return replace(self, **chosen, kept={})


def no_action(info: EnvInfo, n_rows: int, device: torch.device) -> Tensor:
    """Return the last actions at the start of episodes, as `AgentInputs` holds them."""
    if info.box is None:
        return torch.full((n_rows, info.n_agents), -1, device=device)
    return torch.zeros(n_rows, info.n_agents, info.box.dim, device=device)


class Agent(nn.Module, ABC):
    """Values of all actions from what agents see and remember; the constructor is `cls(config, info)`.

    Attributes:
        number: of the first agent, not 0 where each agent has a network of its own.
    """

    number: int = 0

    def __init__(self, config: Config | None = None, info: EnvInfo | None = None) -> None:
        """Make a module without parameters; subclasses use the arguments."""
        super().__init__()

    @abstractmethod
    def init_hidden(self, n_slots: int) -> Tensor:
        """Return the hidden state at the start of episodes, [B, n, H]; H = 0 for an agent without memory."""

    @abstractmethod
    def forward(self, inputs: AgentInputs, packing: Packing) -> Tensor:
        """Return the values [S, n, A] of whole episodes, from inputs of S packed rows."""

    @abstractmethod
    def step(self, inputs: AgentInputs, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Return the values [B, n, A] of one step and the new hidden state [B, n, H]."""


class Remembers(Protocol):
    """An agent whose memory a loss can read (`belief_loss`)."""

    def unroll(self, inputs: AgentInputs, packing: Packing) -> tuple[Tensor, Tensor]:
        """Return the values [S, n, A] of `forward`, and the hidden state after each row, [S, n, H]."""


class RecurrentAgent(Agent):
    """An agent with a GRU: subclasses encode the inputs and compute values from the hidden state; they make `rnn`."""

    rnn: PackedGRU

    def __init__(self, config: Config, info: EnvInfo) -> None:
        super().__init__()
        require_step(type(self), "encode or values")
        self.n_agents, self.checkpointing = info.n_agents, config.enable_gradient_checkpointing

    @abstractmethod
    def encode(self, inputs: AgentInputs) -> tuple[Tensor, ...]:
        """Return the GRU's input [S, n, dim], then whatever else `values` needs."""

    @abstractmethod
    def values(self, hidden: Tensor, *others: Tensor) -> Tensor:
        """Return the values [S, n, A] from hidden states [S, n, H] and what else `encode` has returned."""

    def init_hidden(self, n_slots: int) -> Tensor:
        """Return the hidden state at the start of episodes, [B, n, H] zeros."""
        return self.rnn.weight_hh.new_zeros(n_slots, self.n_agents, self.rnn.hidden_dim)

    def step(self, inputs: AgentInputs, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Return the values [B, n, A] of one step and the new hidden state [B, n, H]."""
        encoded, *others = self.encode(inputs)
        # DRQN (Hausknecht & Stone 2015): what was seen stands in for the state that no agent sees.
        hidden = self.rnn.step(encoded, hidden)
        return self.values(hidden, *others), hidden

    def forward(self, inputs: AgentInputs, packing: Packing) -> Tensor:
        """Return the values [S, n, A] of whole episodes.

        With `enable_gradient_checkpointing` (Chen et al. 2016, arXiv:1604.06174) only the hidden states between blocks
        of `STEPS_AT_ONCE` time steps are kept; backward computes the activations of one block at a time again.
        """
        return self.unroll(inputs, packing)[0]

    def unroll(self, inputs: AgentInputs, packing: Packing) -> tuple[Tensor, Tensor]:
        """Return the values of `forward` and the hidden state after each row, [S, n, H]."""
        # Without gradients nothing is kept for backward, and blocks would only cost time.
        if not self.checkpointing or not torch.is_grad_enabled():
            return self._unroll(inputs, packing, None)
        # A capture cannot read the random state; an agent that needs it is found by the check of its graph.
        keeps = not (inputs.features.is_cuda and torch.cuda.is_current_stream_capturing())
        values, states, first = [], [], 0
        start: Tensor | None = None
        for begin in range(0, packing.n_steps, STEPS_AT_ONCE):
            part = Packing(tuple(min(k - begin, STEPS_AT_ONCE) for k in packing.lengths if k > begin))
            rows = slice(first, first + sum(part.lengths))
            block = (inputs.rows(rows), part, None if start is None else start[: part.n_episodes])
            made, hidden = checkpoint(self._unroll, *block, use_reentrant=False, preserve_rng_state=keeps)
            values.append(made)
            states.append(hidden)
            # Episodes that go on are the first rows of each step: they begin the next block where this one ends.
            start, first = hidden[-part.batch_sizes[-1] :], rows.stop
        return torch.cat(values), torch.cat(states)

    def _unroll(self, inputs: AgentInputs, packing: Packing, start: Tensor | None) -> tuple[Tensor, Tensor]:
        encoded, *others = self.encode(inputs)
        # Encoder and head see all rows at once; only the recurrence goes step by step.
        hidden = self.rnn(encoded, packing, start)
        return self.values(hidden, *others), hidden


class InputLinear(nn.Linear):
    """`nn.Linear` over [features | one-hot of the last action | one-hot of the agent].

    The product with a one-hot is a column of the weight, so these columns are looked up instead of multiplied: a table
    holds bias + column of the action + column of the agent for every pair (see `lookup_relu`). The numbers of a
    continuous last action follow the features instead.

    Args:
        n_features: width of the features. out_features: width of the result.
        config: `obs_last_action` and `obs_agent_id` choose the one-hots. info: their sizes.
    """

    def __init__(self, n_features: int, out_features: int, config: Config, info: EnvInfo) -> None:
        last = info.action_dim if config.obs_last_action else 0
        self.appends = last > 0 and info.box is not None
        numbers, one_hot = (last, 0) if self.appends else (0, last)
        self.widths = [n_features + numbers, one_hot, info.n_agents if config.obs_agent_id else 0]
        super().__init__(sum(self.widths), out_features)
        self.looks_up = sum(self.widths[1:]) > 0
        self.n_agents = info.n_agents
        self._kept: tuple[tuple[int, int, int], Tensor, Tensor, Tensor] | None = None

    def forward(self, features: Tensor, last_action: Tensor) -> Tensor:  # type: ignore[override]
        """Return [S, n, out] from features [S, n, d] and last_action [S, n] int64 (-1: none, a one-hot of zeros)."""
        features, last_action = self._appended(features, last_action)
        if not self.looks_up:
            return fast_linear(features, self.weight, self.bias)
        if features.is_cuda and torch.is_grad_enabled():
            return self._with_one_hots(features, last_action)
        of_features, table, index = self.lookup(last_action)
        return fast_linear(features, of_features) + F.embedding(index, table)

    def relu(self, features: Tensor, last_action: Tensor) -> Tensor:
        """Return the ReLU of the same; on a CPU in one pass over the rows."""
        if features.is_cuda or not self.looks_up or not is_only(self, InputLinear):
            return F.relu(self(features, last_action))
        features, last_action = self._appended(features, last_action)
        return lookup_relu(features, *self.lookup(last_action))

    def _appended(self, features: Tensor, last_action: Tensor) -> tuple[Tensor, Tensor]:
        """Return the features with a continuous last action behind them, and -1, for none, in its place."""
        if not last_action.is_floating_point():
            return features, last_action
        number = torch.full(last_action.shape[:-1], -1, device=last_action.device)
        return torch.cat([features, last_action.to(features)], dim=-1) if self.appends else features, number

    def _with_one_hots(self, features: Tensor, last_action: Tensor) -> Tensor:
        """Return the same by products: on a GPU the gradient of many look-ups waits for the host (pytorch #82886)."""
        of_features, of_actions, of_agents = self.weight.split(self.widths, dim=1)
        out = F.linear(features, of_features, self.bias)
        if self.widths[1]:
            taken = last_action.unsqueeze(-1) == torch.arange(self.widths[1], device=last_action.device)
            out = out + F.linear(taken.to(features.dtype), of_actions)
        return out + of_agents.t() if self.widths[2] else out

    def lookup(self, last_action: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the weights of the features, the table, and each row's place in the table [S, n]."""
        n_actions = self.widths[1]
        if torch.is_inference_mode_enabled():
            of_features, table, first = self._acting_tables()
            return of_features, table, last_action + first if n_actions else first.expand_as(last_action)
        # The first step of an episode has no last action: a row of its own, without a column of the weight.
        index = torch.where(last_action < 0, n_actions, last_action) if n_actions else torch.zeros_like(last_action)
        if self.widths[2]:
            index = index + torch.arange(self.n_agents, device=index.device) * (n_actions + 1)
        return *self._tables(), index

    def _acting_tables(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return `_tables` for acting, and the place of each agent's action 0 in the table, [n].

        An agent's row for no action comes first there: one sum then gives the place of action -1, too.
        The tables are kept from tick to tick until the weights are written, moved or replaced. Writes that torch does
        not count (`weight.data`, torch's fused optimizers) must be counted by hand: see `SyncedOptimizer`.
        """
        # Version and address change with every write that torch counts, and when the weights move.
        state = (self.weight._version, self.bias._version, self.weight.data_ptr())
        if self._kept is None or self._kept[0] != state:
            rows = self.widths[1] + 1
            of_features, table = self._tables()
            table = table.unflatten(0, (-1, rows)).roll(1, 1).flatten(0, 1)
            agents = torch.arange(self.n_agents, device=table.device) if self.widths[2] else torch.zeros(1).to(table)
            self._kept = (state, of_features, table, agents.long() * rows + (1 if self.widths[1] else 0))
        return self._kept[1:]

    def _tables(self) -> tuple[Tensor, Tensor]:
        """Return the weights of the features, and a row for each pair of agent and last action (the last one: none)."""
        of_features, of_actions, of_agents = self.weight.split(self.widths, dim=1)
        # W [x | onehot(a) | onehot(i)] + b = W_x x + (W_a[:, a] + W_i[:, i] + b): the bracket is a row of a table.
        table = F.pad(of_actions.t(), (0, 0, 0, 1)).unsqueeze(0) + self.bias
        if self.widths[2]:
            table = table + of_agents.t().unsqueeze(1)
        return of_features, table.flatten(0, 1).contiguous()  # kernels read rows, which of_agents.t() has not


class RNNAgent(RecurrentAgent):
    """PyMARL's agent (Rashid et al. 2018, arXiv:1803.11485, figure 2): q = W_2 GRU(relu(W_1 x), h), for all actions.

    x is the flat observation, with the last action and the agent's number; weights are shared by all agents.
    """

    reads_inferences = True
    continuous = True  # knows of actions only how many numbers they have

    def __init__(self, config: Config, info: EnvInfo) -> None:
        super().__init__(config, info)
        self.n_inferred = n_inferred(config, info.layout)
        # Weights are shared; the agent's number lets agents that see the same act apart.
        self.fc1 = InputLinear(info.obs_dim + self.n_inferred, config.rnn_hidden_dim, config, info)
        self.rnn = PackedGRU(config.rnn_hidden_dim, config.rnn_hidden_dim)
        self.fc2 = FastLinear(config.rnn_hidden_dim, info.n_actions)

    def encode(self, inputs: AgentInputs) -> tuple[Tensor, ...]:
        """Return the GRU's input [S, n, H]."""
        return (self.fc1.relu(inputs.read(self.n_inferred), inputs.last_action),)

    def values(self, hidden: Tensor, *others: Tensor) -> Tensor:
        """Return the values [S, n, A]."""
        return self.fc2(hidden)


class NRNNAgent(RNNAgent):
    """`RNNAgent` with q = W_2 norm(h), a layer norm (Ba et al. 2016, arXiv:1607.06450), if `use_layer_norm`.

    `use_orthogonal`: both layers start orthogonal.
    """

    def __init__(self, config: Config, info: EnvInfo) -> None:
        super().__init__(config, info)
        self.norm = nn.LayerNorm(config.rnn_hidden_dim) if config.use_layer_norm else nn.Identity()
        if config.use_orthogonal:
            # Orthogonal maps keep the length of what they read (Saxe et al. 2014); PyMARL2 starts so.
            nn.init.orthogonal_(self.fc1.weight)
            nn.init.orthogonal_(self.fc2.weight, gain=HEAD_GAIN)
            nn.init.zeros_(self.fc1.bias)
            nn.init.zeros_(self.fc2.bias)

    def values(self, hidden: Tensor, *others: Tensor) -> Tensor:
        """Return the values [S, n, A]."""
        return super().values(self.norm(hidden))
