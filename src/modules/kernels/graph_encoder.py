"""`graph_ops.encode_graphs` as one operation, its elementwise work in Numba kernels.

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

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from omagd.config.env_info import EntityLayout

NODES_AT_ONCE = 2048  # nodes of a chunk of graphs


class Graphs:
    """The distinct nodes of the graphs of observations; rows and chunks as in `compiled_graphs`.

    Args:
        kernels: that module. obs: [R, obs_dim]. index: [R], what an own node reads beside its features, less than
            n_rows. layout: of the observations. width: D of a node.
    """

    def __init__(self, kernels: Any, obs: Tensor, index: Tensor, layout: EntityLayout, width: int, n_rows: int) -> None:
        n_graphs, n_nodes = len(obs), layout.n_nodes
        self.kernels, self.at_once = kernels, max(1, NODES_AT_ONCE // n_nodes)
        self.size, self.share = np.float32(n_nodes), np.float32(1 / n_nodes)
        nodes = np.empty((n_graphs * n_nodes, width), np.float32)
        self.weight = np.empty(n_graphs * n_nodes, np.float32)
        self.graphs = np.empty((n_graphs, 6), np.int64)
        chunks = np.empty((-(-n_graphs // self.at_once), 4), np.int64)
        sizes = (layout.move_dim, layout.n_enemies, layout.enemy_dim, layout.n_allies, layout.ally_dim, layout.own_dim)
        self.index, self.room = np.empty(n_graphs, np.int64), np.empty(n_nodes, np.int64)
        room = (index.contiguous().numpy(), self.index, np.empty(n_rows, np.int64))
        kernels.make_nodes(
            obs.contiguous().numpy(), sizes, self.at_once, nodes, self.weight, self.graphs, chunks, *room
        )
        self.chunks: list[list[int]] = chunks.tolist()
        self.n_rows = self.chunks[-1][3] if self.chunks else 0
        self.most = max((end - first for first, _, _, end in self.chunks), default=0)
        self.nodes = nodes
        # Of each chunk: its first row, from there on the ends of own rows, allies and enemies, its graphs, and the rows
        # of the table that own nodes read.
        self.parts: list[tuple[int, tuple[int, int, int], slice, np.ndarray, np.ndarray]] = []
        for number, (first, ally, enemy, end) in enumerate(self.chunks):
            of = slice(number * self.at_once, (number + 1) * self.at_once)
            ends = ally - first, enemy - first, end - first
            self.parts.append((first, ends, of, self.graphs[of], self.index[of]))


class EncodeGraphs(torch.autograd.Function):
    """From the nodes of graphs to the mean over their nodes; equations above."""

    @staticmethod
    def forward(
        ctx: Any, graphs: Graphs, table: Tensor, w_self: Tensor, w_ally: Tensor, b_ally: Tensor, w_enemy: Tensor,
        b_enemy: Tensor, *layers: Tensor,
    ) -> Tensor:  # fmt: skip
        """Return [R, d]; d is a multiple of `LANES`.

        table: its row `graphs.index` is added to an own node. layers: W [2d, d] = [W_s | W_n] / N and b [2d] of each.
        """
        kernels, n_graphs, dim = graphs.kernels, len(graphs.graphs), w_ally.shape[0]
        weights, biases = [w.t().contiguous() for w in layers[::2]], [b.numpy() for b in layers[1::2]]
        embeddings = [w.t().contiguous().numpy() for w in (w_self, w_ally, w_enemy)]
        keep = any(ctx.needs_input_grad)
        rows = graphs.n_rows if keep else graphs.most
        # What enters the first layer is computed again in backward: that takes less time than memory does.
        xs = [table.new_empty(rows if i else graphs.most, dim) for i in range(len(weights))]
        masks = [np.empty((rows if keep else 0, dim // 8), np.uint16) for _ in weights]
        xs.append(table.new_empty(0, dim))
        products, pooled = table.new_empty(graphs.most, 2 * dim), table.new_empty(n_graphs, dim)
        of_products, means = products.numpy(), pooled.numpy()
        first_layer = embeddings, [bias.numpy() for bias in (table, b_ally, b_enemy)]
        (table_, *others), arrays, none = first_layer[1], [x.numpy() for x in xs], means[:0]
        inner = range(1, len(weights))
        for first, ends, of, part, index in graphs.parts:
            begin, size = first if keep else 0, ends[2]
            made = products[:size]
            kernels.embed(first, ends, graphs.nodes, *embeddings, table_, index, *others, arrays[0])
            x = xs[0][:size]
            for i, weight in enumerate(weights):
                # [W_s x | W_n x] / N of all nodes of the chunk.
                torch.mm(x, weight, out=made)
                inside = i + 1 in inner
                read = (of_products, biases[i], graphs.weight, graphs.room, begin if inside else 0)
                sides = (arrays[i + 1], masks[i], graphs.share, none if inside else means[of])
                kernels.convolve(first, part, graphs.size, *read, *sides)
                if inside:
                    x = xs[i + 1][begin : begin + size]
        ctx.graphs, ctx.masks, ctx.first_layer = graphs, masks, first_layer
        ctx.save_for_backward(table, w_ally, *layers[::2], *(xs[1:-1] if keep else ()))
        return pooled

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, given: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of the table, weights and biases."""
        graphs, masks, kernels = ctx.graphs, ctx.masks, ctx.graphs.kernels
        table, w_ally, *more = ctx.saved_tensors
        weights, xs = more[: len(masks)], more[len(masks) :]
        of_embeddings, of_firsts = ([np.zeros_like(x) for x in part] for part in ctx.first_layer)
        of_weights = [weight.new_zeros(weight.shape[::-1]) for weight in weights]
        of_biases = [weight.new_zeros(len(weight)) for weight in weights]
        bias_arrays = [bias.numpy() for bias in of_biases]
        embedded, grad = (table.new_empty(graphs.most, len(w_ally)) for _ in range(2))
        made = table.new_empty(graphs.most, 2 * len(w_ally))
        room = np.zeros((w_ally.shape[1] + 1, len(w_ally)), np.float32)
        array, of_made = grad.numpy(), made.numpy()
        upstream = given.clone(memory_format=torch.contiguous_format).numpy()  # sums of equal graphs are written there
        (embeddings, (table_, *others)), (of_own_table, *of_others) = ctx.first_layer, of_firsts
        x0, none = embedded.numpy(), upstream[:0]
        for first, ends, of, part, index in graphs.parts:
            size, pooled = ends[2], upstream[of]
            g, p = grad[:size], made[:size]
            kernels.embed(first, ends, graphs.nodes, *embeddings, table_, index, *others, x0)
            # Graphs that are equal were computed once; their gradients add up.
            kernels.gather_equal(part, pooled)
            for i in reversed(range(len(weights))):
                sides = (graphs.weight, graphs.room, graphs.share, pooled, of_made, bias_arrays[i])
                kernels.convolve_backward(first, part, graphs.size, array, masks[i], *sides)
                x = xs[i - 1][first : first + size] if i else embedded[:size]
                # dL/dW = x^T p, and dL/dx = p W below: as of any linear layer, p being the gradient behind both ReLUs.
                of_weights[i].addmm_(x.t(), p)
                torch.mm(p, weights[i], out=g)
                pooled = none
            of_kinds = (*of_embeddings, of_own_table, index, *of_others)
            kernels.embed_backward(array, x0, first, ends, graphs.nodes, *of_kinds, room)
        of_self, of_allies, of_enemies = (torch.from_numpy(weight).t().contiguous() for weight in of_embeddings)
        of_table, of_ally, of_enemy = map(torch.from_numpy, of_firsts)
        layers = (grad for w, b in zip(of_weights, of_biases, strict=True) for grad in (w.t().contiguous(), b))
        return None, of_table, of_self, of_allies, of_ally, of_enemies, of_enemy, *layers
