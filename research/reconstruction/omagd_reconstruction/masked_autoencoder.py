"""Inference of what teammates observe, by a masked autoencoder over trajectories (`kind: ma2e`).

Source: Kang, Lee, Kim, Song and Yun, "MA2E: Addressing Partial Observability in Multi-Agent Reinforcement Learning with
Masked Auto-Encoder", ICLR 2025 (openreview.net/forum?id=klpdEThT8q); sizes and losses as in its authors' public code.
README.md of this package lists what differs here.

A window is the last k steps of all n agents. The token of an agent at a step is a linear map of its observation and of
the action before it; tokens of masked agents are zeros. Each token gets its place: step in the window and agent.
An encoder and a decoder that reads it are transformers over all k·n tokens; linear maps give all observations and
actions. Acting masks everybody but the agent itself, and what the others observe now is a further input of the agent.
Shapes: R windows, k steps, n agents, d = d_model, B slots, P active ones.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from omagd.config.env_info import EntityLayout, EnvInfo
from omagd.config.schema import Config, MaskPredictorConfig
from omagd.modules.graph_reconstructers import INFERRED
from omagd.modules.graph_reconstructers.predictor import sinusoidal
from omagd.modules.graph_reconstructers.reconstructor import Reconstruction, Reconstructor
from omagd.modules.graph_reconstructers.tokenizer import Tokenizer
from omagd.modules.ops import FastLinear, attend

AT_ONCE = 64  # windows whose attention matrices stay in the cache


class Layer(nn.Module):
    """A transformer layer as in Vaswani et al. 2017 (arXiv:1706.03762): norms after sums, ReLU.

    Args:
        config: sizes. reads: whether it also attends to a memory, as decoders do.
    """

    def __init__(self, config: MaskPredictorConfig, reads: bool) -> None:
        super().__init__()
        d, n = config.d_model, 1 + reads
        self.n_heads, self.p = config.n_heads, config.dropout
        self.queries = nn.ModuleList(FastLinear(d, d) for _ in range(n))
        self.keys_values = nn.ModuleList(FastLinear(d, 2 * d) for _ in range(n))
        self.merges = nn.ModuleList(FastLinear(d, d) for _ in range(n))
        self.norms = nn.ModuleList(nn.LayerNorm(d) for _ in range(n + 1))
        self.widen, self.narrow = FastLinear(d, config.feedforward_dim), FastLinear(config.feedforward_dim, d)

    def forward(self, x: Tensor, memory: Tensor, n_out: int) -> Tensor:
        """Return [R, n_out, d] of the last `n_out` tokens of x [R, L, d]. memory: [R, L, d], for decoders."""
        p = self.p if self.training else 0.0
        out = x[:, -n_out:]
        parts = zip((x, memory), self.queries, self.keys_values, self.merges, self.norms, strict=False)
        for source, query, key_value, merge, norm in parts:
            mixed = attend(query(out), key_value(source), self.n_heads, p)
            out = norm(out + F.dropout(merge(mixed), p))
        hidden = F.dropout(self.widen(out).relu(), p)
        result: Tensor = self.norms[-1](out + F.dropout(self.narrow(hidden), p))
        return result


class MaskedAutoencoder(nn.Module):
    """The network at the top of this file.

    Args:
        config: `stacked_steps` is k; `n_layers` of the encoder, one fewer of the decoder. info: of the environment.

    Attributes:
        mean: [n, obs_dim], mean observation of each living agent in training, the baseline of the metrics.
    """

    mean: Tensor
    places: Tensor

    def __init__(self, config: MaskPredictorConfig, info: EnvInfo) -> None:
        super().__init__()
        d, self.window, self.n_agents = config.d_model, config.stacked_steps, info.n_agents
        self.obs_dim, self.n_actions = info.obs_dim, info.n_actions
        self.token, self.head = FastLinear(info.obs_dim + 1, d), FastLinear(d, info.obs_dim + 1)
        self.encoder = nn.ModuleList(Layer(config, reads=False) for _ in range(config.n_layers))
        self.decoder = nn.ModuleList(Layer(config, reads=True) for _ in range(max(1, config.n_layers - 1)))
        step = sinusoidal(self.window, d // 2)[:, None].expand(-1, info.n_agents, -1)
        agent = sinusoidal(info.n_agents, d - d // 2).expand(self.window, -1, -1)
        self.register_buffer("places", torch.cat([step, agent], dim=-1), persistent=False)
        self.register_buffer("mean", torch.zeros(info.n_agents, info.obs_dim))

    def joined(self, obs: Tensor, last_action: Tensor) -> Tensor:
        """Return what a token stands for, [S, n, obs_dim + 1]: the action (-1: none) is a number from 0 to 1."""
        action = (last_action + 1).to(obs.dtype) / self.n_actions
        return torch.cat([obs, action.unsqueeze(-1)], dim=-1)

    def embed(self, joined: Tensor) -> Tensor:
        """Return the tokens [S, n, d]."""
        tokens: Tensor = self.token(joined.to(self.token.weight.dtype))
        return tokens

    def forward(self, tokens: Tensor, n_out: int) -> Tensor:
        """Return observations and actions [R, n_out, obs_dim + 1] of the last `n_out` tokens of all steps and agents.

        tokens: [R, k, n, d], zeros where masked.
        """
        memory = out = (tokens + self.places).flatten(1, 2)
        for layer in self.encoder:
            memory = layer(memory, memory, memory.shape[1])
        for layer in self.decoder[:-1]:
            out = layer(out, memory, out.shape[1])
        made: Tensor = self.head(self.decoder[-1](out, memory, n_out))
        return made

    def inferred(self, tokens: Tensor, row: Tensor, agent: Tensor) -> Tensor:
        """Return what the agents `agent` [R] infer that everybody observes now, [R, n, obs_dim], from their own tokens.

        tokens: [P, k, n, d], zeros before episodes. row: [R], in tokens.
        """
        made = []
        for rows, agents in zip(row.split(AT_ONCE), agent.split(AT_ONCE), strict=True):
            shown = tokens.new_zeros((len(rows), *tokens.shape[1:]))
            shown[torch.arange(len(rows), device=row.device), :, agents] = tokens[rows, :, agents]
            made.append(self(shown, self.n_agents)[..., :-1])
        return torch.cat(made)


class InferringReconstructor(Reconstructor):
    """Gives agents, beside their unchanged observations, what they infer that the others observe.

    Args:
        tokenizer: not read. predictor: trained; it is frozen and put into eval mode in place. config, info: of the run
            and of an environment with a layout.
    """

    shape_keys = ("kind", "d_model", "n_layers", "n_heads", "feedforward_dim", "stacked_steps")
    training_fields = ("obs", "full_obs", "actions")
    pretraining = ("stage2",)
    field = INFERRED

    def __init__(
        self, tokenizer: Tokenizer | None, predictor: MaskedAutoencoder, config: Config, info: EnvInfo
    ) -> None:
        assert info.layout is not None
        super().__init__(info.layout, predictor.mean.device)
        self.predictor = predictor.eval().requires_grad_(False)
        agents = torch.arange(info.n_agents)
        self._others = torch.stack([agents[agents != i] for i in agents]).to(self.device)  # [n, n - 1]
        self.begin(0)

    @classmethod
    def new_predictor(cls, config: Config, info: EnvInfo) -> MaskedAutoencoder:
        """Return an untrained autoencoder."""
        return MaskedAutoencoder(config.mask_predictor_config, info)

    @classmethod
    def fields(cls, config: Config, info: EnvInfo) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        """Return the field of what is inferred."""
        assert info.layout is not None
        return {INFERRED: (torch.float16, (info.n_agents, cls.n_inferred(info.layout)))}

    @staticmethod
    def n_inferred(layout: EntityLayout) -> int:
        """Return how many numbers each agent receives: the observations of its allies in their order."""
        return layout.n_allies * layout.obs_dim

    def begin(self, n_slots: int) -> None:
        """Start with empty windows in `n_slots` slots, and with the current weights."""
        places = self.predictor.places
        self._tokens = places.new_zeros((n_slots, *places.shape))

    @torch.inference_mode()
    def reset(self, which: np.ndarray) -> None:
        """Empty the windows of the slots `which` [B] bool, where episodes start."""
        self._tokens[torch.as_tensor(which, device=self.device)] = 0

    def _fill(self, obs: Tensor, now: Tensor, played: Tensor, actions: Tensor) -> Reconstruction:
        net = self.predictor
        after = torch.cat([self._tokens[:, 1:], net.embed(net.joined(obs, actions))[:, None]], dim=1)
        self._tokens = torch.where(played[:, None, None, None], after, self._tokens)
        slot, agent = (obs.any(-1) & played[:, None]).nonzero(as_tuple=True)
        made = net.inferred(self._tokens, slot, agent)
        inferred = made[torch.arange(len(slot), device=self.device)[:, None], self._others[agent]].flatten(1)
        stored = torch.zeros((*obs.shape[:2], inferred.shape[1]), dtype=torch.float16, device=self.device)
        stored[slot, agent] = inferred.half()
        return Reconstruction({self.field: stored}, obs, self._nothing(obs))

    @torch.no_grad()
    def restore(self, data: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Return the observations as they are, and that no node is a guess."""
        return data["obs"], self._nothing(data["obs"])

    def _nothing(self, obs: Tensor) -> Tensor:
        return torch.zeros((*obs.shape[:-1], self.layout.n_nodes), dtype=torch.bool, device=obs.device)

    def snapshot(self) -> dict[str, Tensor]:
        """Return the windows of all slots."""
        return {"tokens": self._tokens.clone()}

    def load_snapshot(self, snapshot: dict[str, Tensor]) -> None:
        """Continue from a `snapshot` of as many slots."""
        self._tokens = snapshot["tokens"].to(self.device).clone()
