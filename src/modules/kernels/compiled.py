"""Elementwise work of learning as Numba kernels: one pass over a step's rows, while they are in the cache.

torch needs a call for each operation, and each call reads and writes its tensors again. The formulas stand where the
kernels are called: `gru.py`, `linear.py`, `transformer.py`. Arrays hold float32. Imported by
`compiled_kernels` alone, because Numba may be missing.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from llvmlite import ir
from numba import extending, types

from omagd.utils.compiling import Compiler

_compiler = Compiler(Path(__file__).resolve().parent, "learning kernels", "about 5 s", fused=True)
intrinsic: Callable[[Callable[..., Any]], Any] = extending.intrinsic
function, kernel = _compiler.function, _compiler.kernel

ZERO, ONE, TWO = np.float32(0.0), np.float32(1.0), np.float32(2.0)
LIMIT = np.float32(87.0)  # exp of it is a float32
LOG2_E = np.float32(1.4426950408889634)
SHIFT = np.float32(1.5 * 2**23)  # added to a number below 2^22, it leaves the nearest integer in the lowest bits
LN_2, LN_2_REST = np.float32(0.693359375), np.float32(-2.12194440e-4)  # their sum is ln 2 in more than float32
# exp(r) = 1 + r + r^2 p(r) for |r| <= ln(2) / 2, within 2e-7 relative (Cephes, Moshier 1989).
C0, C1, C2 = np.float32(1.9875691500e-4), np.float32(1.3981999507e-3), np.float32(8.3334519073e-3)
C3, C4, C5 = np.float32(4.1665795894e-2), np.float32(1.6666665459e-1), np.float32(5.0000001201e-1)


@intrinsic
def two_to(_: Any, shifted: Any) -> Any:
    """Return 2^k from SHIFT + k: the lowest bits become a float's exponent. Whole vectors at once, unlike `ldexp`."""

    def generate(_: Any, builder: Any, __: Any, args: Any) -> Any:
        whole = ir.IntType(32)
        exponent = builder.shl(builder.bitcast(args[0], whole), ir.Constant(whole, 23))
        return builder.bitcast(builder.add(exponent, ir.Constant(whole, 127 << 23)), ir.FloatType())

    return types.float32(shifted), generate


@function
def exp(x: Any) -> Any:
    """Return e^x for x between -87 and 87, within 2e-7 relative; NaN for NaN."""
    x = LIMIT if x > LIMIT else (-LIMIT if x < -LIMIT else x)
    shifted = x * LOG2_E + SHIFT
    # x = k ln 2 + r: e^x = 2^k e^r with a small r, for which six terms are enough.
    k = shifted - SHIFT
    r = x - k * LN_2 - k * LN_2_REST
    p = ((((C0 * r + C1) * r + C2) * r + C3) * r + C4) * r + C5
    return (p * r * r + r + ONE) * two_to(shifted)


@function
def sigmoid(x: Any) -> Any:
    """Return 1 / (1 + e^-x)."""
    return ONE / (ONE + exp(-x))


@kernel
def gru_forward(
    place: tuple[int, int, int, int], from_x: Any, from_hidden: Any, bias: Any, before: Any, row: Any, gates: Any,
    out: Any,
) -> None:  # fmt: skip
    """Do a step of k rows behind its products: write [n | r | z | m] and h'.

    place: k, and the step's first rows in from_x, in before and in out. from_x: W_i x for [n | r | z]. from_hidden: W_h
    h for [r | z | m], from row 0 on. bias: [4H]. before: holds h. row: room for one row's gates, [4H]. gates: takes
    [n | r | z | m] in the rows of `out`, unless it has no rows.
    """
    k, first_x, first_before, first = place
    size = out.shape[1]
    bias_new, bias_both, bias_inner = bias[:size], bias[size : 3 * size], bias[3 * size :]
    new, both, inner = row[:size], row[size : 3 * size], row[3 * size :]
    reset, update = both[:size], both[size:]
    for i in range(k):
        of_x, of_hidden, h, after = from_x[first_x + i], from_hidden[i], before[first_before + i], out[first + i]
        x_new, x_both = of_x[:size], of_x[size:]
        h_both, h_inner = of_hidden[: 2 * size], of_hidden[2 * size :]
        for j in range(2 * size):
            both[j] = sigmoid(x_both[j] + h_both[j] + bias_both[j])
        for j in range(size):
            inner[j] = h_inner[j] + bias_inner[j]
        for j in range(size):
            # tanh(a) = 2 sigmoid(2 a) - 1: one exp serves all gates.
            new[j] = TWO * sigmoid(TWO * (x_new[j] + bias_new[j] + reset[j] * inner[j])) - ONE  # tanh(a)
        for j in range(size):
            # h' = (1 - z) n + z h, with one product.
            after[j] = new[j] + update[j] * (h[j] - new[j])
        if len(gates):
            kept = gates[first + i]
            for j in range(4 * size):
                kept[j] = row[j]


@kernel
def gru_backward(
    place: tuple[int, int, int, int, int, int], grads: Any, gates: Any, given: Any, carried: Any, more: Any,
    before: Any, hidden: Any, sums: Any,
) -> None:  # fmt: skip
    """Do a step of k rows before its product: [d_n | d_r | d_z | d_m] from g = given + carried + more.

    place: k, the rows of `more`, the step's first rows in grads, in before and in gates, and its number. grads: takes
    the gradients, [., 4H]. given: dL/dh', in the rows of `gates`. carried: [., H], becomes g z. before: holds h, copied
    to `hidden` in the rows of `grads`. sums: [T, 4H], to whose row the gradients are added.
    """
    k, n_more, first_grads, first_before, first, t = place
    of_bias = sums[t]
    size = carried.shape[1]
    for i in range(k):
        row, made = gates[first + i], grads[first_grads + i]
        new, reset, update, inner = row[:size], row[size : 2 * size], row[2 * size : 3 * size], row[3 * size :]
        for_new, for_reset = made[:size], made[size : 2 * size]
        for_update, for_inner = made[2 * size : 3 * size], made[3 * size :]
        g, from_out, h, copied = carried[i], given[first + i], before[first_before + i], hidden[first_grads + i]
        for j in range(size):
            g[j] += from_out[j]
        if i < n_more:
            from_product = more[i]
            for j in range(size):
                g[j] += from_product[j]
        for j in range(size):
            z, n = update[j], new[j]
            # d_n = g (1 - z) (1 - n²), the derivative of tanh from its value.
            for_new[j] = g[j] * (ONE - z) * (ONE - n * n)
        for j in range(size):
            z = update[j]
            # d_z = g (h - n) z (1 - z).
            for_update[j] = g[j] * (h[j] - new[j]) * z * (ONE - z)
        for j in range(size):
            r = reset[j]
            # d_r = d_n m r (1 - r).
            for_reset[j] = for_new[j] * inner[j] * r * (ONE - r)
        for j in range(size):
            # d_m = d_n r: the reset gate is behind the product with h, as in cuDNN.
            for_inner[j] = for_new[j] * reset[j]
        for j in range(size):
            # What goes on to h directly; what goes through W_h is added by the caller's product.
            g[j] *= update[j]
        for j in range(size):
            copied[j] = h[j]
        for j in range(4 * size):
            of_bias[j] += made[j]


@kernel
def lookup_relu(product: Any, table: Any, index: Any, out: Any) -> None:
    """Set out to relu(product + table[index]); `product` may be `out` itself."""
    for i in range(len(out)):
        row, read, added = out[i], product[i], table[index[i]]
        for j in range(out.shape[1]):
            y = read[j] + added[j]
            # Not max(0, y): that would turn NaN to 0, and hide weights that have overflowed.
            row[j] = ZERO if y < ZERO else y


@kernel
def lookup_relu_backward(given: Any, out: Any, index: Any, grad: Any, for_table: Any) -> None:
    """Set grad to `given` where out > 0 and to 0 elsewhere, and add it to the rows `index` of for_table."""
    for i in range(len(out)):
        row, read, y, of_table = grad[i], given[i], out[i], for_table[index[i]]
        for j in range(out.shape[1]):
            # ReLU'(y) from its output, so that its input need not be kept.
            row[j] = read[j] if y[j] > ZERO else ZERO
        for j in range(out.shape[1]):
            of_table[j] += row[j]


@function
def sign(x: Any) -> Any:
    """Return -1, 0 or 1, the derivative of |x|."""
    return ONE if x > ZERO else (-ONE if x < ZERO else ZERO)


@function
def dot_absolute(a: Any, w: Any, b: Any) -> Any:
    """Return the sum of a |w + b|, in four parts that a processor adds side by side."""
    one, two, three, four, rest = ZERO, ZERO, ZERO, ZERO, len(a) % 4
    for e in range(0, len(a) - rest, 4):
        one += a[e] * abs(w[e] + b[e])
        two += a[e + 1] * abs(w[e + 1] + b[e + 1])
        three += a[e + 2] * abs(w[e + 2] + b[e + 2])
        four += a[e + 3] * abs(w[e + 3] + b[e + 3])
    for e in range(len(a) - rest, len(a)):
        one += a[e] * abs(w[e] + b[e])
    return (one + two) + (three + four)


@kernel
def mix_inputs(first: Any, bias: Any, linear: tuple[int, int]) -> None:
    """Add `bias` to the rows of `first` and apply ReLU, except in the columns of the range `linear`."""
    begin, end = linear
    for s in range(len(first)):
        row = first[s]
        for j in range(len(bias)):
            x = row[j] + bias[j]
            # b1 is a value by itself; the others are first layers, behind which a ReLU stands.
            row[j] = x if (begin <= j < end) or not (x < ZERO) else ZERO


@kernel
def mix_forward(
    q: Any, raw1: Any, bias1: Any, raw2: Any, bias2: Any, read: Any, head: Any, hidden: Any, joint: Any
) -> None:
    """Write a = |W1|^T q + b1 to `hidden` [S, E] and |w2|^T elu(a) + b2 to `joint` [S]; see `CompiledMix`.

    raw1 [S, n E] and raw2 [S, E]: W1 and w2 before their biases. read: rows that end with b1 [E] and the input of b2
    [E]. head: weights and bias of b2, [E + 1].
    """
    agents, size = q.shape[1], raw2.shape[1]
    for s in range(len(q)):
        row, last = read[s], read.shape[1] - size
        b1, of_b2, a, w2 = row[last - size : last], row[last:], hidden[s], raw2[s]
        for e in range(size):
            a[e] = b1[e]
        for i in range(agents):
            w, b, q_i = raw1[s, i * size : (i + 1) * size], bias1[i * size : (i + 1) * size], q[s, i]
            for e in range(size):
                # |W1|^T q: absolute weights make Q_tot monotonic (QMIX, eq. 5).
                a[e] += abs(w[e] + b[e]) * q_i
        total = head[size]
        for e in range(size):
            elu = a[e] if a[e] > ZERO else exp(a[e]) - ONE
            # |w2|^T elu(a) + b2, both sums in one pass.
            total += elu * abs(w2[e] + bias2[e]) + of_b2[e] * head[e]
        joint[s] = total


@kernel
def mix_backward(
    given: Any, q: Any, raw1: Any, bias1: Any, raw2: Any, bias2: Any, read: Any, head: Any, hidden: Any, for_q: Any,
    for_raw1: Any, for_raw2: Any, for_first: Any, sums: Any,
) -> None:  # fmt: skip
    """Write the gradients of q, raw1, raw2 and of b1 and b2's input (the last columns of `for_first`).

    given: dL/dQ_tot [S]. sums [3, .]: the sums over rows of for_raw1, for_raw2 and of the gradient of `head` are added.
    """
    agents, size = q.shape[1], raw2.shape[1]
    of_bias1, of_bias2, of_head = sums[0], sums[1], sums[2]
    for s in range(len(q)):
        g, row, last = given[s], read[s], read.shape[1] - size
        of_b2, a, w2, made2 = row[last:], hidden[s], raw2[s], for_raw2[s]
        made_b1, made_b2 = for_first[s, last - size : last], for_first[s, last:]
        for e in range(size):
            w = w2[e] + bias2[e]
            elu = a[e] if a[e] > ZERO else exp(a[e]) - ONE
            # d_w2 = g elu(a) sign(w2): the gradient passes |.| by its sign.
            made2[e] = g * elu * sign(w)
            # d_a = g |w2| elu'(a), where elu' = elu + 1 below 0.
            a[e] = g * abs(w) * (ONE if a[e] > ZERO else elu + ONE)  # from here on the gradient of a
        for e in range(size):  # one result in each loop: with more, LLVM does not see that arrays are apart
            made_b1[e] = a[e]
        for e in range(size):
            made_b2[e] = g * head[e] if of_b2[e] > ZERO else ZERO
        for e in range(size):
            of_bias2[e] += made2[e]
        for e in range(size):
            of_head[e] += g * of_b2[e]
        of_head[size] += g
        for i in range(agents):
            w1, b, made = raw1[s, i * size : (i + 1) * size], bias1[i * size : (i + 1) * size], for_raw1[s, i * size :]
            q_i, of_bias = q[s, i], of_bias1[i * size :]
            # d_q = |W1| d_a.
            for_q[s, i] = dot_absolute(a, w1, b)
            for e in range(size):
                # d_W1 = q d_a^T sign(W1).
                made[e] = a[e] * q_i * sign(w1[e] + b[e])
            for e in range(size):
                of_bias[e] += made[e]


@kernel
def mix_inputs_backward(from1: Any, from2: Any, read: Any, for_first: Any, sums: Any) -> None:
    """Write the gradients of the first columns of `read` that pass its ReLU: from1, from2 [S, .]; sums: as before."""
    width1, width2 = from1.shape[1], from2.shape[1]
    for s in range(len(from1)):
        row, made, one, two = read[s], for_first[s], from1[s], from2[s]
        row2, made2 = row[width1:], made[width1:]
        # ReLU'(x) from its result, which is above 0 where x was.
        for j in range(width1):
            made[j] = one[j] if row[j] > ZERO else ZERO
        for j in range(width2):
            made2[j] = two[j] if row2[j] > ZERO else ZERO
        for j in range(for_first.shape[1]):
            sums[j] += made[j]


def prepare() -> None:
    """Compile all kernels, or load them."""
    _compiler.prepare(_call_all)


def _call_all() -> None:
    some, line, places = np.zeros((0, 4), np.float32), np.zeros(16, np.float32), np.zeros(0, np.int64)
    gru_forward((0, 0, 0, 0), some, some, line, some, line, some, some)
    gru_backward((0, 0, 0, 0, 0, 0), *[some] * 8)
    mix_inputs(some, line, (0, 0))
    mix_forward(some, some, line, some, line, some, line, some, line)
    mix_backward(line, some, some, line, some, line, some, line, *[some] * 6)
    mix_inputs_backward(some, some, some, some, line)
    lookup_relu(some, some, places, some)
    lookup_relu_backward(some, some, places, some, some)
