"""Embedding, graph convolutions and mean of `gnn_rnn` as one operation, its elementwise work in Numba kernels.

A unit that an agent does not see, or that is dead, is a node of zeros, and all such allies (or enemies) of one graph
stay equal through all layers. They are computed once, with their number as weight w, and graphs pass in chunks that
stay in a core's cache. For nodes x_i of a graph with N nodes, x_i = relu(E f_i + b) at first, each layer is

    s_i = W_n x_i,  t = sum of w_j s_j + (N - 1) b_n,  x_i' = relu(W_s x_i + b_s) + relu(t - s_i)

with W and b divided by N, and the result is the sum of w_i x_i / N. Backward, with g_i = dL/dx_i' (a row of weight w
has the sum over its nodes) and r_i = g_i where the second ReLU passes:

    d(W_s x_i) = g_i where the first ReLU passes,  d(s_i) = w_i (sum of r_j) - r_i,  d(b_n) = (N - 1) (sum of r_j)

Compared with the layers in float64, in values and gradients: tests/test_learning_kernels.py.
"""

from __future__ import annotations

from functools import cache
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from omagd.config.env_info import EntityLayout
from omagd.modules.kernels.compiling import kernels_for
from omagd.utils.compiling import compiled_or_reference

NODES_AT_ONCE = 2048  # nodes of a chunk of graphs


def graph_kernels_for(features: Tensor, n_numbers: int) -> ModuleType | None:
    """Return the Numba kernels for graphs of observations like these, or None: use the layers; see `kernels_for`.

    Acting uses the layers: its batches are small, and their sizes differ from tick to tick.
    """
    if torch.is_inference_mode_enabled() or features.requires_grad or kernels_for(features, n_numbers) is None:
        return None
    return _kernels()


@cache
def _kernels() -> ModuleType | None:
    def load() -> ModuleType | None:
        from omagd.modules.kernels import compiled_graphs

        compiled_graphs.prepare()
        return compiled_graphs

    return compiled_or_reference(load, None)


class Graphs:
    """The distinct nodes of the graphs of observations; rows and chunks as in `compiled_graphs`.

    Args:
        kernels: that module. obs: [R, obs_dim]. marks: [R, N·w], w of each node. index: [R], what an own node reads
            beside its features, less than n_rows. layout: of the observations. width: D of a node, with its marks.
    """

    def __init__(
        self, kernels: Any, obs: Tensor, marks: Tensor, index: Tensor, layout: EntityLayout, width: int, n_rows: int
    ) -> None:
        n_graphs, n_nodes = len(obs), layout.n_nodes
        self.kernels, self.at_once = kernels, max(1, NODES_AT_ONCE // n_nodes)
        self.size, self.share = np.float32(n_nodes), np.float32(1 / n_nodes)
        nodes = np.empty((n_graphs * n_nodes, width), np.float32)
        self.weight = np.empty(n_graphs * n_nodes, np.float32)
        self.graphs = np.empty((n_graphs, 6), np.int64)
        self.place = np.empty((n_graphs, layout.n_enemies), np.int64)
        chunks = np.empty((-(-n_graphs // self.at_once), 4), np.int64)
        sizes = (layout.move_dim, layout.n_enemies, layout.enemy_dim, layout.n_allies, layout.ally_dim, layout.own_dim)
        read = (obs.contiguous().numpy(), marks.contiguous().numpy())
        self.index = np.empty(n_graphs, np.int64)
        room = (index.contiguous().numpy(), self.index, np.empty(layout.n_allies, np.int64), np.empty(n_rows, np.int64))
        kernels.make_nodes(*read, sizes, self.at_once, nodes, self.weight, self.graphs, chunks, self.place, *room)
        self.chunks: list[list[int]] = chunks.tolist()
        self.n_rows = self.chunks[-1][3] if self.chunks else 0
        self.most = max((end - first for first, _, _, end in self.chunks), default=0)
        self.nodes = torch.from_numpy(nodes[: self.n_rows])

    def chunk(self, number: int) -> slice:
        """Return the graphs of a chunk."""
        return slice(number * self.at_once, (number + 1) * self.at_once)


class EncodeGraphs(torch.autograd.Function):
    """From the nodes of graphs to the mean over their nodes, and to the enemies' nodes; equations above."""

    @staticmethod
    def forward(
        ctx: Any, graphs: Graphs, entity: bool, table: Tensor, w_self: Tensor, w_ally: Tensor, b_ally: Tensor,
        w_enemy: Tensor, b_enemy: Tensor, *layers: Tensor,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Return [R, d] and, if `entity`, [R, n_enemies, d], else [0, n_enemies, d].

        table: its row `graphs.index` is added to an own node. layers: W [2d, d] = [W_s | W_n] / N and b [2d] of each.
        """
        kernels, n_graphs, dim = graphs.kernels, len(graphs.graphs), w_ally.shape[0]
        weights, biases = [w.t() for w in layers[::2]], [b.numpy() for b in layers[1::2]]
        embeddings = [w.t() for w in (w_self, w_ally, w_enemy)]
        keep = any(ctx.needs_input_grad)
        rows = graphs.n_rows if keep else graphs.most
        xs = [table.new_empty(rows, dim) for _ in weights]
        masks = [np.empty((rows if keep else 0, dim), np.uint8) for _ in weights]
        last, products = table.new_empty(graphs.most, dim), table.new_empty(graphs.most, 2 * dim)
        pooled = table.new_empty(n_graphs, dim)
        enemies = table.new_empty(n_graphs if entity else 0, graphs.place.shape[1], dim)
        places, of_products, means = torch.from_numpy(graphs.place), products.numpy(), pooled.numpy()
        read = (graphs.weight, np.empty(dim, np.float32))  # and room for a graph's total
        bias = (table.numpy(), graphs.index, b_ally.numpy(), b_enemy.numpy())
        for c, (first, ally, enemy, end) in enumerate(graphs.chunks):
            of, here = graphs.chunk(c), slice(first, end) if keep else slice(0, end - first)
            x, made, part = [*(x[here] for x in xs), last[: end - first]], products[: end - first], graphs.graphs[of]
            arrays = [y.numpy() for y in x]
            for begin, stop, weight in zip((first, ally, enemy), (ally, enemy, end), embeddings, strict=True):
                torch.mm(graphs.nodes[begin:stop], weight, out=x[0][begin - first : stop - first])
            kernels.embed(arrays[0], (ally - first, enemy - first), bias[0], bias[1][of], *bias[2:])
            for i, weight in enumerate(weights):
                torch.mm(x[i], weight, out=made)
                sides = (arrays[i + 1], masks[i][here] if keep else masks[i])
                kernels.convolve(first, part, graphs.size, of_products, biases[i], *read, *sides)
            kernels.pool(first, part, graphs.share, arrays[-1], graphs.weight, means[of])
            if entity:
                torch.index_select(x[-1], 0, places[of].flatten() - first, out=enemies[of].flatten(0, 1))
        ctx.graphs, ctx.masks, ctx.entity = graphs, masks, entity
        ctx.save_for_backward(table, w_self, w_ally, w_enemy, *layers[::2], *(xs if keep else ()))
        return pooled, enemies

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, given: Tensor, for_enemies: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of the table, weights and biases."""
        graphs, masks, kernels = ctx.graphs, ctx.masks, ctx.graphs.kernels
        table, w_self, w_ally, w_enemy, *more = ctx.saved_tensors
        weights, xs = more[: len(masks)], more[len(masks) :]
        dim = w_ally.shape[0]
        of_table, of_ally, of_enemy = torch.zeros_like(table), table.new_zeros(dim), table.new_zeros(dim)
        of_embeddings = [torch.zeros_like(weight) for weight in (w_self, w_ally, w_enemy)]
        of_weights = [torch.zeros_like(weight) for weight in weights]
        of_biases = [weight.new_zeros(len(weight)) for weight in weights]
        grad, made = table.new_empty(graphs.most, dim), table.new_empty(graphs.most, 2 * dim)
        arrays, of_made, room = grad.numpy(), made.numpy(), np.empty(dim, np.float32)
        upstream, of_nodes = given.contiguous().numpy(), for_enemies.contiguous().numpy()
        bias = (of_table.numpy(), graphs.index, of_ally.numpy(), of_enemy.numpy())
        for c, (first, ally, enemy, end) in enumerate(graphs.chunks):
            of, here = graphs.chunk(c), slice(first, end)
            g, p, part, array = grad[: end - first], made[: end - first], graphs.graphs[of], arrays[: end - first]
            read = (upstream[of], graphs.weight, of_nodes[of], graphs.place[of])
            kernels.pool_backward(first, part, graphs.share, *read, array)
            for i in reversed(range(len(weights))):
                sides = (masks[i][here], graphs.weight, room, of_made, of_biases[i].numpy())
                kernels.convolve_backward(first, part, graphs.size, array, *sides)
                of_weights[i].addmm_(p.t(), xs[i][here])
                torch.mm(p, weights[i], out=g)
            counts = (ally - first, enemy - first)
            kernels.embed_backward(array, xs[0][here].numpy(), counts, bias[0], bias[1][of], *bias[2:])
            for (begin, stop), weight in zip(((first, ally), (ally, enemy), (enemy, end)), of_embeddings, strict=True):
                weight.addmm_(g[begin - first : stop - first].t(), graphs.nodes[begin:stop])
        of_self, of_allies, of_enemies = of_embeddings
        layers = (grad for pair in zip(of_weights, of_biases, strict=True) for grad in pair)
        return None, None, of_table, of_self, of_allies, of_ally, of_enemies, of_enemy, *layers
