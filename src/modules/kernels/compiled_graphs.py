"""Elementwise work of graph convolutions as Numba kernels; formulas and callers are in `graph_encoder.py`.

Rows of a chunk of graphs: their own nodes, then their allies, then their enemies. `graphs` [G, 6] int64 holds of each
graph its own row, its first ally and the end of its allies, its first enemy and the end of its enemies, and the number
in the chunk of the first graph that equals it: a copy has the rows of that graph. `weight` is how many nodes of the
graph a row stands for. `base` is the row that the arrays of a chunk begin with.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from omagd.utils.compiling import Compiler

_compiler = Compiler(Path(__file__).resolve().parent, "kernels of graph agents", "about 3 s", fused=True, checked=False)
function, kernel = _compiler.function, _compiler.kernel

ZERO, ONE = np.float32(0.0), np.float32(1.0)
HEAD = 4  # visible, dist, relx, rely of the agent itself: 1, 0, 0, 0
OWN, OTHERS = np.uint8(1), np.uint8(2)  # bits of a mask: which of the two ReLUs of a convolution let a number pass


@function
def clear(x: Any) -> None:
    """Set x to 0."""
    for j in range(len(x)):
        x[j] = ZERO


@function
def copy(x: Any, out: Any, begin: int) -> None:
    """Write x to out from `begin` on."""
    for j in range(len(x)):
        out[begin + j] = x[j]


@function
def is_empty(x: Any, marks: Any) -> Any:
    """Return whether a node or an observation shows nothing: all features 0, and no mark."""
    for j in range(len(x)):
        if x[j] != ZERO:
            return False
    for j in range(len(marks)):
        if marks[j] != ZERO:
            return False
    return True


@function
def add_nodes(x: Any, marks: Any, dim: int, nodes: Any, weight: Any, place: Any, row: int) -> int:
    """Write the nodes of one kind in one graph from `row` on, empty ones once; return the end.

    x: [k * dim] features. marks: [k * w]. place: [k], takes the row of each.
    """
    empty, width = -1, len(marks) // max(len(place), 1)
    for i in range(len(place)):
        features, mark = x[i * dim : (i + 1) * dim], marks[i * width : (i + 1) * width]
        nothing = is_empty(features, mark)
        if nothing and empty >= 0:
            weight[empty] += ONE
            place[i] = empty
            continue
        if nothing:
            empty = row
        node = nodes[row]
        clear(node)
        copy(features, node, 0)
        copy(mark, node, len(node) - width)
        weight[row] = ONE
        place[i] = row
        row += 1
    return row


@kernel
def make_nodes(
    obs: Any, marks: Any, sizes: tuple[int, int, int, int, int, int], at_once: int, nodes: Any, weight: Any,
    graphs: Any, chunks: Any, place: Any, index: Any, of_own: Any, allies: Any, dead: Any,
) -> None:  # fmt: skip
    """Write the distinct nodes of all observations [R, obs_dim], in chunks of `at_once` graphs.

    marks: [R, N * w], w of each node. sizes: of the layout, in the order of the observation: move features, enemies and
    their features, allies and theirs, own features. chunks: [C, 4], takes the first own, ally and enemy row, and the
    end. place: [R, n_enemies], takes the row of each enemy. index: [R], what else an own node reads: of observers that
    show nothing (the dead) those with equal numbers are copies. of_own: [R], takes the numbers of a chunk's own rows
    from its first graph on. allies, dead: room for [n_allies] and [most of index + 1].
    """
    move, n_enemies, enemy_dim, n_allies, ally_dim, own = sizes
    first_ally = move + n_enemies * enemy_dim
    first_own = first_ally + n_allies * ally_dim
    width, row = marks.shape[1] // (1 + n_allies + n_enemies), 0
    end_of_allies = (1 + n_allies) * width
    for c in range(len(chunks)):
        begin, end = c * at_once, min((c + 1) * at_once, len(obs))
        for j in range(len(dead)):
            dead[j] = -1
        chunks[c, 0] = row
        for g in range(begin, end):
            graphs[g, 5] = g - begin
            if is_empty(obs[g], marks[g]):
                if dead[index[g]] >= 0:
                    graphs[g, 5] = dead[index[g]]
                    graphs[g, 0] = graphs[begin + dead[index[g]], 0]
                    continue
                dead[index[g]] = g - begin
            node, x = nodes[row], obs[g]
            clear(node)
            node[0] = ONE
            copy(x[:move], node, HEAD)
            copy(x[first_own : first_own + own], node, HEAD + move)
            copy(marks[g, :width], node, len(node) - width)
            weight[row], graphs[g, 0], of_own[row - chunks[c, 0] + begin] = ONE, row, index[g]
            row += 1
        chunks[c, 1] = row
        for g in range(begin, end):
            same = begin + graphs[g, 5]
            if same != g:
                graphs[g, 1], graphs[g, 2] = graphs[same, 1], graphs[same, 2]
                continue
            graphs[g, 1] = row
            of_allies = marks[g, width:end_of_allies]
            row = add_nodes(obs[g, first_ally:first_own], of_allies, ally_dim, nodes, weight, allies, row)
            graphs[g, 2] = row
        chunks[c, 2] = row
        for g in range(begin, end):
            same = begin + graphs[g, 5]
            if same != g:
                graphs[g, 3], graphs[g, 4] = graphs[same, 3], graphs[same, 4]
                for e in range(n_enemies):
                    place[g, e] = place[same, e]
                continue
            graphs[g, 3] = row
            of_enemies = marks[g, end_of_allies:]
            row = add_nodes(obs[g, move:first_ally], of_enemies, enemy_dim, nodes, weight, place[g], row)
            graphs[g, 4] = row
        chunks[c, 3] = row


@function
def add_relu(row: Any, added: Any) -> None:
    """Set row to relu(row + added)."""
    for j in range(len(added)):
        y = row[j] + added[j]
        row[j] = ZERO if y < ZERO else y


@kernel
def embed(x: Any, counts: tuple[int, int], table: Any, index: Any, of_ally: Any, of_enemy: Any) -> None:
    """Set the products `x` of a chunk to relu(x + bias). counts: rows of own nodes, and of these and allies."""
    for i in range(counts[0]):
        add_relu(x[i], table[index[i]])
    for i in range(counts[0], counts[1]):
        add_relu(x[i], of_ally)
    for i in range(counts[1], len(x)):
        add_relu(x[i], of_enemy)


@function
def mask_relu(grad: Any, out: Any, bias: Any) -> None:
    """Set grad to 0 where out is not positive, and add it to that of the bias."""
    for j in range(len(bias)):
        g = grad[j] if out[j] > ZERO else ZERO
        grad[j] = g
        bias[j] += g


@kernel
def embed_backward(
    grad: Any, x: Any, counts: tuple[int, int], table: Any, index: Any, of_ally: Any, of_enemy: Any
) -> None:
    """Turn the gradient of `embed`'s result x into that of its products; add those of the biases."""
    for i in range(counts[0]):
        mask_relu(grad[i], x[i], table[index[i]])
    for i in range(counts[0], counts[1]):
        mask_relu(grad[i], x[i], of_ally)
    for i in range(counts[1], len(x)):
        mask_relu(grad[i], x[i], of_enemy)


@function
def add_scaled(total: Any, x: Any, scale: Any) -> None:
    """Add x times `scale` to total."""
    for j in range(len(total)):
        total[j] += x[j] * scale


@function
def convolve_row(product: Any, bias: Any, total: Any, out: Any) -> None:
    """Set out to relu(p_s + b_s) + relu(total - p_n), product = [p_s | p_n]."""
    size = len(out)
    own, sent = product[:size], product[size:]
    for j in range(size):
        a, b = own[j] + bias[j], total[j] - sent[j]
        out[j] = (a if a > ZERO else ZERO) + (b if b > ZERO else ZERO)


@function
def mask_row(product: Any, bias: Any, total: Any, mask: Any) -> None:
    """Write which ReLUs of `convolve_row` let numbers pass."""
    size = len(mask)
    own, sent = product[:size], product[size:]
    for j in range(size):
        mask[j] = (OWN if own[j] + bias[j] > ZERO else np.uint8(0)) | (
            OTHERS if total[j] - sent[j] > ZERO else np.uint8(0)
        )


@kernel
def convolve(
    base: int, graphs: Any, n_nodes: Any, products: Any, bias: Any, weight: Any, total: Any, out: Any, masks: Any
) -> None:
    """Do a convolution behind its product [m, 2d], [own | sent]; bias [2d]. masks: [m, d] uint8, or no rows."""
    size = out.shape[1]
    for g in range(len(graphs)):
        own, first, last, first_enemy, last_enemy, same = graphs[g]
        if same != g:
            continue
        for j in range(size):
            total[j] = products[own - base, size + j] + (n_nodes - ONE) * bias[size + j]
        for i in range(first - base, last - base):
            add_scaled(total, products[i, size:], weight[base + i])
        for i in range(first_enemy - base, last_enemy - base):
            add_scaled(total, products[i, size:], weight[base + i])
        convolve_row(products[own - base], bias, total, out[own - base])
        for i in range(first - base, last - base):
            convolve_row(products[i], bias, total, out[i])
        for i in range(first_enemy - base, last_enemy - base):
            convolve_row(products[i], bias, total, out[i])
        if len(masks):
            mask_row(products[own - base], bias, total, masks[own - base])
            for i in range(first - base, last - base):
                mask_row(products[i], bias, total, masks[i])
            for i in range(first_enemy - base, last_enemy - base):
                mask_row(products[i], bias, total, masks[i])


@function
def add_received(total: Any, grad: Any, mask: Any) -> None:
    """Add the gradient that passes the second ReLU."""
    for j in range(len(total)):
        total[j] += grad[j] if mask[j] & OTHERS else ZERO


@function
def spread_row(grad: Any, mask: Any, total: Any, scale: Any, made: Any, of_bias: Any) -> None:
    """Write the gradient of a row's product, and add its first half to that of the bias."""
    size = len(total)
    own, sent = made[:size], made[size:]
    for j in range(size):
        own[j] = grad[j] if mask[j] & OWN else ZERO
    for j in range(size):
        sent[j] = total[j] * scale - (grad[j] if mask[j] & OTHERS else ZERO)
    for j in range(size):
        of_bias[j] += own[j]


@kernel
def convolve_backward(
    base: int, graphs: Any, n_nodes: Any, grad: Any, masks: Any, weight: Any, total: Any, made: Any, of_bias: Any
) -> None:
    """Write the gradient of the product, `made` [m, 2d], from that of the result, `grad` [m, d]; add the bias's."""
    size = grad.shape[1]
    for g in range(len(graphs)):
        own, first, last, first_enemy, last_enemy, same = graphs[g]
        if same != g:
            continue
        clear(total)
        add_received(total, grad[own - base], masks[own - base])
        for i in range(first - base, last - base):
            add_received(total, grad[i], masks[i])
        for i in range(first_enemy - base, last_enemy - base):
            add_received(total, grad[i], masks[i])
        spread_row(grad[own - base], masks[own - base], total, ONE, made[own - base], of_bias)
        for i in range(first - base, last - base):
            spread_row(grad[i], masks[i], total, weight[base + i], made[i], of_bias)
        for i in range(first_enemy - base, last_enemy - base):
            spread_row(grad[i], masks[i], total, weight[base + i], made[i], of_bias)
        add_scaled(of_bias[size:], total, n_nodes - ONE)


@kernel
def pool(base: int, graphs: Any, share: Any, x: Any, weight: Any, out: Any) -> None:
    """Write the mean over all nodes of each graph, [G, d]. share: 1 / N."""
    for g in range(len(graphs)):
        own, first, last, first_enemy, last_enemy, same = graphs[g]
        row = out[g]
        if same != g:
            copy(out[same], row, 0)
            continue
        clear(row)
        add_scaled(row, x[own - base], share)
        for i in range(first - base, last - base):
            add_scaled(row, x[i], weight[base + i] * share)
        for i in range(first_enemy - base, last_enemy - base):
            add_scaled(row, x[i], weight[base + i] * share)


@kernel
def pool_backward(
    base: int, graphs: Any, share: Any, given: Any, weight: Any, enemies: Any, place: Any, grad: Any
) -> None:
    """Write the gradient of `pool`'s nodes x; `enemies` [G, n_enemies, d], or no graphs, is that of the enemies."""
    for i in range(len(grad)):
        clear(grad[i])
    for g in range(len(graphs)):
        own, first, last, first_enemy, last_enemy, _ = graphs[g]
        add_scaled(grad[own - base], given[g], share)
        for i in range(first - base, last - base):
            add_scaled(grad[i], given[g], weight[base + i] * share)
        for i in range(first_enemy - base, last_enemy - base):
            add_scaled(grad[i], given[g], weight[base + i] * share)
        if len(enemies):
            for e in range(place.shape[1]):
                add_scaled(grad[place[g, e] - base], enemies[g, e], ONE)


def prepare() -> None:
    """Compile all kernels, or load them."""
    _compiler.prepare(_call_all)


def _call_all() -> None:
    exact, line, places = np.zeros((0, 4), np.float32), np.zeros(8, np.float32), np.zeros(0, np.int64)
    rows, masks = np.zeros((0, 6), np.int64), np.zeros((0, 4), np.uint8)
    make_nodes(exact, exact, (0, 1, 1, 0, 1, 0), 1, exact, line, rows, rows, rows, *[places] * 4)
    embed(exact, (0, 0), exact, places, line, line)
    embed_backward(exact, exact, (0, 0), exact, places, line, line)
    convolve(0, rows, ONE, exact, line, line, line, exact, masks)
    convolve_backward(0, rows, ONE, exact, masks, line, line, exact, line)
    pool(0, rows, ONE, exact, line, exact)
    pool_backward(0, rows, ONE, exact, line, np.zeros((0, 1, 4), np.float32), rows, exact)
