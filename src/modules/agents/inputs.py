"""What agents read, and a first layer that reads it without one-hots."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from omagd.config.env_info import EnvInfo
from omagd.config.schema import Config
from omagd.modules.kernels.linear import to_bf16

ROWS_AT_ONCE = 2048  # what is worked on at once stays in a core's cache


@dataclass(frozen=True)
class AgentInputs:
    """Rows of agents' inputs: packed steps (S) in learning, battle slots (B) in acting.

    Args:
        features: [S, n, obs_dim], flat observations (seen, reconstructed or full), in the agent's float type.
        last_action: [S, n] int64, -1 where the episode starts.
        guessed: [S, n, N] bool, nodes whose features are guesses; None where nothing is reconstructed.
    """

    features: Tensor
    last_action: Tensor
    guessed: Tensor | None = None

    @classmethod
    def blank(cls, n_rows: int, info: EnvInfo, like: Tensor) -> AgentInputs:
        """Return inputs of zeros with the float type and device of `like`."""
        features = like.new_zeros(n_rows, info.n_agents, info.obs_dim)
        return cls(features, torch.full((n_rows, info.n_agents), -1, device=like.device))

    def rows(self, chosen: Tensor | slice) -> AgentInputs:
        """Return the inputs of the `chosen` row numbers."""
        guessed = None if self.guessed is None else self.guessed[chosen]
        return AgentInputs(self.features[chosen], self.last_action[chosen], guessed)


class InputLinear(nn.Linear):
    """`nn.Linear` over [features | one-hot of the last action | one-hot of the agent], computed by looking columns up.

    Args:
        n_features: width of the features. out_features: width of the result.
        config: `obs_last_action` and `obs_agent_id` say which one-hots there are. info: their sizes.
    """

    def __init__(self, n_features: int, out_features: int, config: Config, info: EnvInfo) -> None:
        self.widths = [
            n_features,
            info.n_actions if config.obs_last_action else 0,
            info.n_agents if config.obs_agent_id else 0,
        ]
        super().__init__(sum(self.widths), out_features)
        self.looks_up = sum(self.widths) > n_features
        self.n_agents = info.n_agents
        self.bf16 = config.precision == "bf16"
        self._kept: tuple[tuple[int, int, int], Tensor, Tensor] | None = None

    def forward(self, features: Tensor, last_action: Tensor) -> Tensor:  # type: ignore[override]
        """Return [S, n, out] from features [S, n, d] and last_action [S, n] int64 (-1: none, a one-hot of zeros)."""
        if not self.looks_up:
            return F.linear(features, self.weight, self.bias)
        of_features, table, index = self._looked_up(last_action)
        return F.linear(features, of_features) + F.embedding(index, table)

    def relu(self, features: Tensor, last_action: Tensor) -> Tensor:
        """Return the ReLU of the same; on a CPU in one pass over the rows."""
        if features.is_cuda or not self.looks_up:
            return F.relu(self(features, last_action))
        of_features, table, index = self._looked_up(last_action)
        low = self.bf16 and features.dtype == torch.float32
        flat = features.reshape(-1, features.shape[-1])
        out = _LookedUpRelu.apply(flat, of_features, table, index.reshape(-1), low)
        return out.view(*features.shape[:-1], -1)

    def _looked_up(self, last_action: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the weights of the features, the table of all that is looked up, and each row's place in it [S, n]."""
        n_actions = self.widths[1]
        index = torch.where(last_action < 0, n_actions, last_action) if n_actions else torch.zeros_like(last_action)
        if self.widths[2]:
            index = index + torch.arange(self.n_agents, device=index.device) * (n_actions + 1)
        if not torch.is_inference_mode_enabled():
            return *self._tables(), index
        # While acting, tables stay the same from tick to tick until the weights are written, moved or exchanged. What
        # does not count its writing (`weight.data`, torch's fused optimizers) must do so: see `SyncedOptimizer`.
        state = (self.weight._version, self.bias._version, self.weight.data_ptr())
        if self._kept is None or self._kept[0] != state:
            self._kept = (state, *self._tables())
        return *self._kept[1:], index

    def _tables(self) -> tuple[Tensor, Tensor]:
        """Return the weights of the features and one row for every pair of agent and last action (the last: none)."""
        of_features, of_actions, of_agents = self.weight.split(self.widths, dim=1)
        table = F.pad(of_actions.t(), (0, 0, 0, 1)).unsqueeze(0) + self.bias
        if self.widths[2]:
            table = table + of_agents.t().unsqueeze(1)
        return of_features, table.flatten(0, 1)


class _LookedUpRelu(torch.autograd.Function):
    """relu(features W^T + table[index]), some rows at a time, so that they stay in the cache."""

    @staticmethod
    def forward(ctx: Any, features: Tensor, weight: Tensor, table: Tensor, index: Tensor, low: bool) -> Tensor:
        """Return [R, out] from features [R, d], weight [out, d], table [M, out] and index [R]."""
        out = features.new_empty(len(features), len(weight))
        weight_t = weight.t().bfloat16() if low else weight.t()
        for rows, given, places in zip(*(x.split(ROWS_AT_ONCE) for x in (out, features, index)), strict=True):
            torch.index_select(table, 0, places, out=rows)
            if low:
                rows += torch.mm(to_bf16(given, ROWS_AT_ONCE), weight_t)[: len(rows)]
            else:
                rows.addmm_(given, weight_t)
            rows.relu_()
        ctx.low, ctx.table_rows = low, len(table)
        ctx.save_for_backward(features, weight, index, out)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of features, weight and table from grad_out [R, out]."""
        features, weight, index, out = ctx.saved_tensors
        for_features = torch.empty_like(features) if ctx.needs_input_grad[0] else None
        for_weight, for_table = torch.zeros_like(weight), weight.new_zeros(ctx.table_rows, len(weight))
        start = 0
        for kept, given, places, grad in zip(
            *(x.split(ROWS_AT_ONCE) for x in (out, features, index, grad_out)), strict=True
        ):
            grad = torch.ops.aten.threshold_backward(grad, kept, 0)
            for_table += torch.ops.aten.embedding_dense_backward(grad, places, len(for_table), -1, False)
            if ctx.low:
                for_weight += torch.mm(to_bf16(grad, ROWS_AT_ONCE).t(), to_bf16(given, ROWS_AT_ONCE))
            else:
                for_weight.addmm_(grad.t(), given)
            if for_features is not None:
                torch.mm(grad, weight, out=for_features[start : start + len(grad)])
            start += len(grad)
        return for_features, for_weight, for_table, None, None


def flat_features(inputs: AgentInputs, mark_guesses: bool, n_nodes: int) -> Tensor:
    """Return the features [S, n, d], followed by the guess marks [S, n, N] where the agent is told."""
    if not mark_guesses:
        return inputs.features
    return torch.cat([inputs.features, guess_marks(inputs, n_nodes)], dim=-1)


def guess_marks(inputs: AgentInputs, n_nodes: int) -> Tensor:
    """Return [S, n, N] in the type of the features: 1 where a node is a guess; zeros where nothing is reconstructed."""
    if inputs.guessed is None:
        return inputs.features.new_zeros(*inputs.features.shape[:-1], n_nodes)
    return inputs.guessed.to(inputs.features.dtype)
