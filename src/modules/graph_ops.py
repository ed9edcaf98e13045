"""The operators of models of graphs: convolutions over units, attention, and cross-entropy over tokens.

Each is a plain expression and takes a fast form of `modules/kernels/` where one fits, as the operators of `ops.py` do.
Letters: S rows, n agents, N nodes of an agent's graph, F frames, L tokens of a sequence, M masked tokens, K codes.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from omagd.config.env_info import EntityLayout
from omagd.modules.agents.agent import AgentInputs, InputLinear
from omagd.modules.graph_reconstructers.graphs import obs_to_nodes
from omagd.modules.kernels import kernels_for, transformer
from omagd.modules.kernels.graph_encoder import EncodeGraphs, Graphs
from omagd.modules.ops import fast_linear, is_only

GRAPHS_AT_ONCE = 512  # graphs that pass together, so that their nodes stay in the cache

Kinds = tuple[InputLinear, nn.Linear, nn.Linear]
"""Layers for an agent's own node, for its allies and for its enemies."""


class FullGraphConv(nn.Module):
    """One convolution on the fully connected graph of N nodes.

        x_i' = (relu(W_s x_i + b_s) + relu(sum over j != i of (W_n x_j + b_n))) / N

    A graph neural network whose weights tell a node from its neighbours (Morris et al. 2019, arXiv:1810.02244, section
    3, the basic model), with a ReLU for each of both parts, and their mean.

    Args:
        dim: features of a node, in and out.
    """

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.own = nn.Linear(dim, dim)
        self.others = nn.Linear(dim, dim)

    def shared(self, n_nodes: int) -> tuple[Tensor, Tensor]:
        """Return [W_s | W_n] / N and [b_s | b_n] / N: relu(a) / N = relu(a / N), and nodes are not divided then."""
        weight, bias = torch.cat([self.own.weight, self.others.weight]), torch.cat([self.own.bias, self.others.bias])
        return weight * (1.0 / n_nodes), bias * (1.0 / n_nodes)

    def forward(self, nodes: Tensor) -> Tensor:
        """Return [..., N, dim] from nodes [..., N, dim]."""
        # One product for both maps; each node then hears the sum of all messages but its own.
        own, sent = fast_linear(nodes, *self.shared(nodes.shape[-2])).chunk(2, dim=-1)
        received = (sent.sum(dim=-2, keepdim=True) - sent).relu_()
        return F.relu(own) + received


def encode_graphs(inputs: AgentInputs, layout: EntityLayout, kinds: Kinds, layers: nn.Sequential) -> Tensor:
    """Return the mean over the nodes of each agent's graph after all convolutions, [S, n, dim].

    kinds: the embedding of each kind of node, relu(W x + b). layers: `FullGraphConv`s.
    """
    made = _encode_by_kernels(inputs, layout, kinds, layers)
    if made is not None:
        return made
    (own, ally, enemy), pooled = kinds, []
    # In pieces that fit the cache: convolutions read and write each node several times.
    rows = max(1, GRAPHS_AT_ONCE // inputs.last_action.shape[1])
    for obs, last_action in zip(inputs.features.split(rows), inputs.last_action.split(rows), strict=True):
        # Kinds of units have other features, so each has an embedding of its own before they mix.
        nodes = obs_to_nodes(obs, layout).split([1, layout.n_allies, layout.n_enemies], dim=-2)
        embedded = own(nodes[0].squeeze(-2), last_action).unsqueeze(-2), ally(nodes[1]), enemy(nodes[2])
        pooled.append(layers(torch.cat(embedded, dim=-2).relu_()).mean(dim=-2))
    return torch.cat(pooled)


def _encode_by_kernels(inputs: AgentInputs, layout: EntityLayout, kinds: Kinds, layers: nn.Sequential) -> Tensor | None:
    """Return `encode_graphs` with each distinct node computed once; None where the kernels do not fit."""
    (own, ally, enemy), shape, dim = kinds, inputs.last_action.shape, kinds[1].out_features
    # In bf16 the layers multiply. They act, too: its batches are small, and their sizes differ from tick to tick.
    if torch.is_autocast_enabled("cpu") or torch.is_inference_mode_enabled() or inputs.features.requires_grad:
        return None
    kernels = kernels_for(inputs.features, shape.numel() * layout.n_nodes * dim, "compiled_graphs")
    known = InputLinear, nn.Linear, nn.Sequential, FullGraphConv
    if kernels is None or dim % kernels.LANES or not all(is_only(part, *known) for part in (*kinds, layers)):
        return None
    of_features, table, index = own.lookup(inputs.last_action)
    sizes = of_features.shape[1], len(table)
    # Trained and target network read the same graphs: the one that comes second finds them made.
    graphs = inputs.kept.get(sizes)
    if graphs is None:
        obs = inputs.features.flatten(0, 1)
        graphs = inputs.kept[sizes] = Graphs(kernels, obs, index.flatten(), layout, *sizes)
    embeddings = (p for layer in (ally, enemy) for p in (layer.weight, layer.bias))
    convolutions = (p for layer in layers for p in cast(FullGraphConv, layer).shared(layout.n_nodes))
    pooled = EncodeGraphs.apply(graphs, table, of_features, *embeddings, *convolutions)  # type: ignore[no-untyped-call]
    return cast(Tensor, pooled).unflatten(0, shape)


def attend(query: Tensor, key_value: Tensor, n_heads: int, p: float) -> Tensor:
    """Return softmax(q k^T / sqrt(d / h)) v for each head, [F, n, d] (Vaswani et al. 2017, arXiv:1706.03762, eq. 1).

    query: [F, n, d]. key_value: [F, L, 2 d]. p: dropout of the attention weights.
    """
    n_frames, _, d = query.shape
    kv = key_value.view(n_frames, key_value.shape[1], 2, n_heads, d // n_heads).permute(2, 0, 3, 1, 4)
    q = query.unflatten(-1, (n_heads, -1)).transpose(1, 2)
    if query.device.type == "cpu" and n_frames and not p and not torch.is_autocast_enabled("cpu"):
        k, v = kv.contiguous().flatten(1, 2)
        mixed = transformer.Attention.apply(q.contiguous().flatten(0, 1), k, v)  # type: ignore[no-untyped-call]
        mixed = mixed.unflatten(0, (n_frames, n_heads))
    else:
        # Divided by sqrt(d / h), or softmax would saturate and pass no gradient (section 3.2.1).
        mixed = F.scaled_dot_product_attention(q, kv[0], kv[1], dropout_p=p)
    return mixed.transpose(1, 2).flatten(2)


def cross_entropy(logits: Tensor, log_p: Tensor, target: Tensor) -> Tensor:
    """Return the sum over M tokens of -log p[target], differentiable in logits [M, K + 1].

    log_p: log_softmax of the logits, without a gradient. target: [M] int64.
    """
    if logits.requires_grad:
        # Backward from `log_p`, which is there already, in place of through a second log_softmax.
        return transformer.CrossEntropy.apply(logits, log_p, target)  # type: ignore[no-untyped-call]
    return -log_p.gather(1, target[:, None])[:, 0].sum()
