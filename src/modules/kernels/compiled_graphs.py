"""Elementwise work of graph convolutions as Numba kernels; formulas and callers are in `graph_encoder.py`.

Rows of a chunk of graphs: their own nodes, then their allies, then their enemies. `graphs` [G, 6] int64 holds of each
graph its own row, its first ally and the end of its allies, its first enemy and the end of its enemies; and the number
in the chunk of the first graph that equals it: a copy has the rows of that graph. `weight` is how many nodes of the
graph a row stands for. `base` is the row that the arrays of a chunk begin with. Widths d are multiples of `LANES`.

LLVM vectorises a loop by eight numbers, with a remainder, and asks first whether its arrays overlap: for rows of 64
numbers that takes longer than the work. Here every operation is one of sixteen float32 numbers.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from llvmlite import ir
from numba import extending, types

from omagd.utils.compiling import Compiler

_compiler = Compiler(Path(__file__).resolve().parent, "kernels of graph agents", "about 3 s", fused=True, checked=False)
intrinsic: Callable[[Callable[..., Any]], Any] = extending.intrinsic
function, kernel = _compiler.function, _compiler.kernel

ZERO, ONE = np.float32(0.0), np.float32(1.0)
HEAD = 4  # visible, dist, relx, rely of the agent itself: 1, 0, 0, 0
LANES = 16
_FLOATS, _INTS = (ir.VectorType(kind, LANES) for kind in (ir.FloatType(), ir.IntType(32)))


class Sixteen(types.Type):
    """Numba's type of sixteen float32 numbers."""

    def __init__(self) -> None:
        super().__init__(name="sixteen float32")


sixteen = Sixteen()


@extending.register_model(Sixteen)
class _Register(extending.models.PrimitiveModel):
    def __init__(self, manager: Any, kind: Any) -> None:
        super().__init__(manager, kind, _FLOATS)  # type: ignore[no-untyped-call]


def _operator(op: Callable[..., Any], instruction: str) -> None:
    """Let `op` of two vectors be one instruction; a product and a sum may become one, as in other kernels."""

    @extending.type_callable(op)
    def typed(_: Any) -> Any:
        return lambda a, b: sixteen if isinstance(a, Sixteen) and isinstance(b, Sixteen) else None

    @extending.lower_builtin(op, Sixteen, Sixteen)  # type: ignore[untyped-decorator]
    def lower(_: Any, builder: Any, __: Any, args: Any) -> Any:
        return getattr(builder, instruction)(*args, flags=("contract",))


for _op, _instruction in ((operator.add, "fadd"), (operator.sub, "fsub"), (operator.mul, "fmul")):
    _operator(_op, _instruction)


def _all(kind: Any, number: float) -> Any:
    return ir.Constant(kind, [number] * LANES)


def _address(context: Any, builder: Any, array: Any, memory: Any, place: Any) -> Any:
    data = context.make_array(array)(context, builder, memory).data
    return builder.bitcast(builder.gep(data, [place]), _FLOATS.as_pointer())


@intrinsic
def same(_: Any, number: Any) -> Any:
    """Return a float32 number sixteen times."""

    def generate(_: Any, builder: Any, __: Any, args: Any) -> Any:
        one = builder.insert_element(ir.Constant(_FLOATS, ir.Undefined), args[0], ir.Constant(ir.IntType(32), 0))
        return builder.shuffle_vector(one, ir.Constant(_FLOATS, ir.Undefined), _all(_INTS, 0))

    return sixteen(types.float32), generate


@intrinsic
def load(_: Any, row: Any, place: Any) -> Any:
    """Return the numbers from `place` on in the memory of a contiguous array."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.load(_address(context, builder, signature.args[0], *args), align=4)

    return sixteen(row, types.int64), generate


@intrinsic
def store(_: Any, row: Any, place: Any, numbers: Any) -> Any:
    """Write the numbers as `load` reads them."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        memory, place, numbers = args
        builder.store(numbers, _address(context, builder, signature.args[0], memory, place), align=4)
        return context.get_dummy_value()

    return types.void(row, types.int64, sixteen), generate


@intrinsic
def positive(_: Any, x: Any) -> Any:
    """Return relu(x): 0 where a number is not above 0."""

    def generate(_: Any, builder: Any, __: Any, args: Any) -> Any:
        zero = _all(_FLOATS, 0.0)
        return builder.select(builder.fcmp_ordered(">", args[0], zero), args[0], zero)

    return sixteen(sixteen), generate


@intrinsic
def above_zero(_: Any, x: Any) -> Any:
    """Return which numbers are above 0, as the bits of a uint16."""

    def generate(_: Any, builder: Any, __: Any, args: Any) -> Any:
        return builder.bitcast(builder.fcmp_ordered(">", args[0], _all(_FLOATS, 0.0)), ir.IntType(LANES))

    return types.uint16(sixteen), generate


@intrinsic
def where(_: Any, bits: Any, x: Any) -> Any:
    """Return the numbers whose bit is set, and 0 for the others."""

    def generate(_: Any, builder: Any, __: Any, args: Any) -> Any:
        return builder.select(
            builder.bitcast(args[0], ir.VectorType(ir.IntType(1), LANES)), args[1], _all(_FLOATS, 0.0)
        )

    return sixteen(types.uint16, sixteen), generate


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
def is_empty(x: Any) -> Any:
    """Return whether a node or an observation shows nothing: all features 0."""
    for j in range(len(x)):
        if x[j] != ZERO:
            return False
    return True


@function
def add_nodes(x: Any, k: int, dim: int, nodes: Any, weight: Any, row: int) -> int:
    """Write the k nodes of one kind in one graph from `row` on, empty ones once; return the end.

    x: [k * dim] features.
    """
    empty = -1
    for i in range(k):
        features = x[i * dim : (i + 1) * dim]
        nothing = is_empty(features)
        # Units that show nothing are equal and stay equal through all layers: one row stands for all of them.
        if nothing and empty >= 0:
            weight[empty] += ONE
            continue
        if nothing:
            empty = row
        node = nodes[row]
        clear(node)
        copy(features, node, 0)
        weight[row] = ONE
        row += 1
    return row


@kernel
def make_nodes(
    obs: Any, sizes: tuple[int, int, int, int, int, int], at_once: int, nodes: Any, weight: Any,
    graphs: Any, chunks: Any, index: Any, of_own: Any, dead: Any,
) -> None:  # fmt: skip
    """Write the distinct nodes of all observations [R, obs_dim], in chunks of `at_once` graphs.

    sizes: of the layout, in the order of the observation: move features, enemies and
    their features, allies and theirs, own features. chunks: [C, 4], takes the first own, ally and enemy row, and the
    end. index: [R], what else an own node reads: of observers that show nothing (the dead) those with equal numbers are
    copies. of_own: [R], takes the numbers of a chunk's own rows from its first graph on. dead: room for
    [most of index + 1].
    """
    move, n_enemies, enemy_dim, n_allies, ally_dim, own = sizes
    first_ally = move + n_enemies * enemy_dim
    first_own = first_ally + n_allies * ally_dim
    row = 0
    for c in range(len(chunks)):
        begin, end = c * at_once, min((c + 1) * at_once, len(obs))
        for j in range(len(dead)):
            dead[j] = -1
        chunks[c, 0] = row
        for g in range(begin, end):
            graphs[g, 5] = g - begin
            if is_empty(obs[g]):
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
            weight[row], graphs[g, 0], of_own[row - chunks[c, 0] + begin] = ONE, row, index[g]
            row += 1
        chunks[c, 1] = row
        for g in range(begin, end):
            same = begin + graphs[g, 5]
            if same != g:
                graphs[g, 1], graphs[g, 2] = graphs[same, 1], graphs[same, 2]
                continue
            graphs[g, 1] = row
            row = add_nodes(obs[g, first_ally:first_own], n_allies, ally_dim, nodes, weight, row)
            graphs[g, 2] = row
        chunks[c, 2] = row
        for g in range(begin, end):
            same = begin + graphs[g, 5]
            if same != g:
                graphs[g, 3], graphs[g, 4] = graphs[same, 3], graphs[same, 4]
                continue
            graphs[g, 3] = row
            row = add_nodes(obs[g, move:first_ally], n_enemies, enemy_dim, nodes, weight, row)
            graphs[g, 4] = row
        chunks[c, 3] = row


@function
def rows_of(graph: Any, base: int, rows: Any) -> int:
    """Write the rows of a graph in its chunk, its own first; return their number."""
    own, first, last, first_enemy, last_enemy, _ = graph
    rows[0], n = own - base, 1
    for i in range(first, last):
        rows[n] = i - base
        n += 1
    for i in range(first_enemy, last_enemy):
        rows[n] = i - base
        n += 1
    return n


@function
def bias_of(bias: Any, reads: Any, own: int, i: int, size: int, j: int) -> Any:
    """Return sixteen biases of row i, from j on: those in its row of the biases where it has one of its own."""
    return load(bias, j + own * size * reads[own * i])


@function
def embed_rows(
    nodes: Any, base: int, first: int, last: int, weight: Any, bias: Any, reads: Any, own: int, x: Any
) -> None:
    """Set the rows from `first` to `last` of x to relu(weight' node + bias), four at a time.

    own: 1 where each row reads a row of the biases, `reads`, 0 where all read the first one.
    """
    width, size = weight.shape
    whole = last - (last - first) % 4
    for i in range(first, whole, 4):
        for j in range(0, size, LANES):
            # Four rows share each column of the weight while it is in a register.
            t, u = bias_of(bias, reads, own, i, size, j), bias_of(bias, reads, own, i + 1, size, j)
            v, w = bias_of(bias, reads, own, i + 2, size, j), bias_of(bias, reads, own, i + 3, size, j)
            for k in range(width):
                column = load(weight, k * size + j)
                t = t + same(nodes[base + i, k]) * column
                u = u + same(nodes[base + i + 1, k]) * column
                v = v + same(nodes[base + i + 2, k]) * column
                w = w + same(nodes[base + i + 3, k]) * column
            store(x, i * size + j, positive(t))
            store(x, (i + 1) * size + j, positive(u))
            store(x, (i + 2) * size + j, positive(v))
            store(x, (i + 3) * size + j, positive(w))
    for i in range(whole, last):
        for j in range(0, size, LANES):
            t = bias_of(bias, reads, own, i, size, j)
            for k in range(width):
                t = t + same(nodes[base + i, k]) * load(weight, k * size + j)
            store(x, i * size + j, positive(t))


@kernel
def embed(
    base: int, ends: tuple[int, int, int], nodes: Any, of_own: Any, of_ally: Any, of_enemy: Any, table: Any, index: Any,
    ally: Any, enemy: Any, x: Any,
) -> None:  # fmt: skip
    """Embed the nodes [., D] of a chunk: x [m, d] = relu(weight' node + bias), by weights [D, d] of each kind.

    ends: of the rows of own nodes, of allies, of enemies. table, ally, enemy: biases; own nodes read that of their
    index.
    """
    embed_rows(nodes, base, 0, ends[0], of_own, table, index, 1, x)
    embed_rows(nodes, base, ends[0], ends[1], of_ally, ally, index, 0, x)
    embed_rows(nodes, base, ends[1], ends[2], of_enemy, enemy, index, 0, x)


@function
def add(x: Any, place: int, added: Any, at: int, size: int) -> None:
    """Add `size` numbers of an array from `at` on to those of x from `place` on."""
    for j in range(0, size, LANES):
        store(x, place + j, load(x, place + j) + load(added, at + j))


@function
def masked_gradient(grad: Any, x: Any, i: int, j: int, bias: Any, at: int) -> Any:
    """Return the gradient of sixteen numbers in row i before their ReLU, added to that of the bias."""
    # ReLU'(y) from its result y.
    g = where(above_zero(load(x, i * x.shape[1] + j)), load(grad, i * x.shape[1] + j))
    store(bias, at + j, load(bias, at + j) + g)
    return g


@function
def embed_rows_backward(
    grad: Any, x: Any, nodes: Any, base: int, first: int, last: int, weight: Any, bias: Any, reads: Any, own: int
) -> None:
    """Add the gradients of `embed_rows`'s weight and bias to these; those of the result x are in `grad`."""
    width, size = weight.shape
    whole = last - (last - first) % 4
    # dL/dW = node ⊗ grad where x > 0: the ReLU's mask. Four rows add to a column while it is in a register.
    for i in range(first, whole, 4):
        for j in range(0, size, LANES):
            t = masked_gradient(grad, x, i, j, bias, own * size * reads[own * i])
            u = masked_gradient(grad, x, i + 1, j, bias, own * size * reads[own * (i + 1)])
            v = masked_gradient(grad, x, i + 2, j, bias, own * size * reads[own * (i + 2)])
            w = masked_gradient(grad, x, i + 3, j, bias, own * size * reads[own * (i + 3)])
            for k in range(width):
                column = load(weight, k * size + j) + same(nodes[base + i, k]) * t
                column = column + same(nodes[base + i + 1, k]) * u
                column = column + same(nodes[base + i + 2, k]) * v
                store(weight, k * size + j, column + same(nodes[base + i + 3, k]) * w)
    for i in range(whole, last):
        for j in range(0, size, LANES):
            t = masked_gradient(grad, x, i, j, bias, own * size * reads[own * i])
            for k in range(width):
                store(weight, k * size + j, load(weight, k * size + j) + same(nodes[base + i, k]) * t)


@function
def empty_into(room: Any, weight: Any) -> None:
    """Add `room`, the sums of one chunk [D + 1, d], to a weight, and clear it."""
    for k in range(len(weight)):
        add(weight, k * weight.shape[1], room, k * weight.shape[1], weight.shape[1])
    for k in range(len(room)):
        clear(room[k])


@kernel
def embed_backward(
    grad: Any, x: Any, base: int, ends: tuple[int, int, int], nodes: Any, of_own: Any, of_ally: Any, of_enemy: Any,
    table: Any, index: Any, ally: Any, enemy: Any, room: Any,
) -> None:  # fmt: skip
    """Add the gradients of `embed`'s weights and biases from that of its result x. room: [D + 1, d], zeros."""
    width, size = of_own.shape
    weight, bias = room[:width], room[width]
    embed_rows_backward(grad, x, nodes, base, 0, ends[0], weight, table, index, 1)
    empty_into(room, of_own)
    embed_rows_backward(grad, x, nodes, base, ends[0], ends[1], weight, bias, index, 0)
    add(ally, 0, bias, 0, size)
    empty_into(room, of_ally)
    embed_rows_backward(grad, x, nodes, base, ends[1], ends[2], weight, bias, index, 0)
    add(enemy, 0, bias, 0, size)
    empty_into(room, of_enemy)


@kernel
def convolve(
    base: int, graphs: Any, n_nodes: Any, products: Any, bias: Any, weight: Any, rows: Any, to: int, out: Any,
    masks: Any, share: Any, pooled: Any,
) -> None:  # fmt: skip
    """Do a convolution behind its product [m, 2d], [own | sent]; bias [2d], rows: room for [N] numbers.

    out: [., d], takes the result from row `to` on. masks: [., d / 8] uint16 of all chunks, takes which ReLUs let
    numbers pass. pooled: [G, d], takes the mean of each graph, share = 1 / N. All three may have no rows: not wanted.
    """
    blocks = len(bias) // (2 * LANES)
    size = blocks * LANES
    writes, keeps, pools = len(out) > 0, len(masks) > 0, len(pooled) > 0
    for g in range(len(graphs)):
        if graphs[g, 5] != g:
            continue
        n = rows_of(graphs[g], base, rows)
        for k in range(blocks):
            j = k * LANES
            of_own, of_sent = load(bias, j), load(bias, size + j)
            # t = sum of w_j s_j + (N - 1) b_n: what all nodes send; each one then takes its own message off.
            total, mean = same(n_nodes - ONE) * of_sent, same(ZERO)
            for r in range(n):
                sent = load(products, (2 * rows[r] + 1) * size + j)
                total = total + sent * same(weight[base + rows[r]])
            for r in range(n):
                at = 2 * rows[r] * size + j
                own, received = load(products, at) + of_own, total - load(products, at + size)
                # x_i' = relu(W_s x_i + b_s) + relu(t - s_i).
                made = positive(own) + positive(received)
                if writes:
                    store(out, (to + rows[r]) * size + j, made)
                if keeps:
                    # A bit for each number, instead of the number: all that backward needs to know of a ReLU.
                    row = base + rows[r]
                    masks[row, k], masks[row, blocks + k] = above_zero(own), above_zero(received)
                if pools:
                    mean = mean + made * same(weight[base + rows[r]] * share)
            if pools:
                store(pooled, g * size + j, mean)
    for g in range(len(pooled)):
        if graphs[g, 5] != g:
            copy(pooled[graphs[g, 5]], pooled[g], 0)


@kernel
def convolve_backward(
    base: int, graphs: Any, n_nodes: Any, grad: Any, masks: Any, weight: Any, rows: Any, share: Any, given: Any,
    made: Any, of_bias: Any,
) -> None:  # fmt: skip
    """Write the gradient of the product, `made` [m, 2d], from that of the result, `grad` [m, d]; add the bias's.

    masks: of all chunks. given: [G, d], gradient of the means of graphs, those of equal ones summed, from which that of
    the result follows; without rows `grad` is read.
    """
    blocks = len(of_bias) // (2 * LANES)
    size = blocks * LANES
    pooled = len(given) > 0
    for g in range(len(graphs)):
        if graphs[g, 5] != g:
            continue
        n = rows_of(graphs[g], base, rows)
        for k in range(blocks):
            j = k * LANES
            total, of_own = same(ZERO), load(of_bias, j)
            mean = load(given, g * size + j) * same(share) if pooled else same(ZERO)
            for r in range(n):
                i = rows[r]
                of_row = mean * same(weight[base + i]) if pooled else load(grad, i * size + j)
                # The sum of r_j: a node's message reaches all nodes of its graph.
                total = total + where(masks[base + i, blocks + k], of_row)
            for r in range(n):
                i = rows[r]
                scale = same(weight[base + i])
                of_row = mean * scale if pooled else load(grad, i * size + j)
                own = where(masks[base + i, k], of_row)
                store(made, 2 * i * size + j, own)
                # d(s_i) = w_i (sum of r_j) - r_i: a row of weight w stands for w nodes, and no node hears itself.
                store(made, (2 * i + 1) * size + j, total * scale - where(masks[base + i, blocks + k], of_row))
                of_own = of_own + own
            store(of_bias, j, of_own)
            # d(b_n) = (N - 1) (sum of r_j).
            store(of_bias, size + j, load(of_bias, size + j) + total * same(n_nodes - ONE))


@kernel
def gather_equal(graphs: Any, given: Any) -> None:
    """Add the gradient of the mean of each copy, [G, d], to that of the graph that it equals."""
    size = given.shape[1]
    for g in range(len(graphs)):
        if graphs[g, 5] != g:
            add(given, graphs[g, 5] * size, given, g * size, size)


def prepare() -> None:
    """Compile all kernels, or load them."""
    _compiler.prepare(_call_all)


def _call_all() -> None:
    exact, line, places = np.zeros((0, LANES), np.float32), np.zeros(2 * LANES, np.float32), np.zeros(0, np.int64)
    rows, masks = np.zeros((0, 6), np.int64), np.zeros((0, 2), np.uint16)
    make_nodes(exact, (0, 1, 1, 0, 1, 0), 1, exact, line, rows, rows, *[places] * 3)
    embed(0, (0, 0, 0), exact, exact, exact, exact, exact, np.zeros(1, np.int64), line, line, exact)
    room, ends = np.zeros((1, LANES), np.float32), (0, 0, 0)
    embed_backward(exact, exact, 0, ends, exact, exact, exact, exact, exact, np.zeros(1, np.int64), line, line, room)
    convolve(0, rows, ONE, exact, line, line, places, 0, exact, masks, ONE, exact)
    convolve_backward(0, rows, ONE, exact, masks, line, places, ONE, exact, exact, line)
    gather_equal(rows, exact)
