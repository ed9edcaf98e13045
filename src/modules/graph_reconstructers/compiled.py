"""A tick of reconstruction while acting as kernels: everything but the products, over the active slots only.

The same bits as the torch path of `TokenReconstructor`, the reference, which runs where these kernels do not (GPUs,
`decode: argmax`, the GRU, other float types, without Numba): tests/test_reconstruction.py.

Shapes: B slots, P active ones, n agents, N nodes, D features of a node, F frames with a missing node, k stacked frames,
L = k·N tokens of a frame, d = d_model, M seen or missing nodes.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from omagd.config.env_info import EntityLayout
from omagd.modules.graph_reconstructers.frozen import PLACES, ROUND, FrozenPredictor
from omagd.modules.graph_reconstructers.graphs import GraphTables
from omagd.modules.graph_reconstructers.predictor import N_SPECIAL, SlotHistory
from omagd.utils.compiling import Compiler

compiler = Compiler(Path(__file__).resolve().parent, "kernels of reconstruction", "3 to 6 s")
function, kernel = compiler.function, compiler.kernel

Array = np.ndarray
HALF, TINY = np.float32(0.5), np.float32(2.0**-24)  # TINY: the smallest float16 above 0


class Graph(NamedTuple):
    """How observations become nodes, as in `GraphTables`; all int64.

    Attributes:
        source: [N, D], feature of each place of the nodes plus 2; 0 and 1 are these constants.
        node, column: [obs_dim], the node of each feature and its place there.
    """

    source: Array
    node: Array
    column: Array


class Memory(NamedTuple):
    """The arrays of `SlotHistory`: past [depth, B, n, N], last_ids, last_step [B, n, N]; all int64."""

    past: Array
    last_ids: Array
    last_step: Array


class Tables(NamedTuple):
    """Embeddings of the predictor. static [steps, L·d], tokens, recall [K + 3, d], age [steps, d] float32.

    Attributes:
        fact: [4] int64: K, the step limit, steps between stacked frames, and whether `last_seen`.
    """

    static: Array
    tokens: Array
    recall: Array
    age: Array
    fact: Array


CODES, LIMIT, STRIP, LAST_SEEN = range(4)  # entries of `Tables.fact`


@function
def to_half(x: np.float32) -> np.uint16:
    """Return the bits of the float16 nearest to x, of two the even one (IEEE 754)."""
    bits = np.int64(np.float32(x).view(np.uint32))
    sign, exponent, fraction = (bits >> 16) & 0x8000, ((bits >> 23) & 0xFF) - 112, bits & 0x7FFFFF
    if exponent > 30:  # too large, infinite or not a number
        nan = exponent == 143 and fraction > 0
        return np.uint16(sign | 0x7E00 if nan else sign | 0x7C00)
    if exponent < -10:
        return np.uint16(sign)
    shift = np.int64(13)
    if exponent > 0:
        fraction |= exponent << 23
    else:  # below the smallest normal number
        fraction |= 0x800000
        shift = 14 - exponent
    half, rest, middle = fraction >> shift, fraction & ((1 << shift) - 1), 1 << (shift - 1)
    up = 1 if rest > middle or (rest == middle and half & 1) else 0
    return np.uint16((sign | half) + up)


@function
def from_half(bits: np.uint16) -> np.float32:
    """Return the number that a finite float16 with these bits is."""
    b = np.int64(bits)
    exponent, fraction = (b >> 10) & 31, b & 1023
    size = np.float32(fraction) * TINY
    if exponent > 0:
        size = np.float32(np.uint32(((exponent + 112) << 23) | (fraction << 13)).view(np.float32))
    return -size if b & 0x8000 else size


@kernel
def look(graph: Graph, obs: Array, slots: Array, missing: Array, where: Array, nodes: Array) -> int:
    """Find the nodes that agents see or miss in obs [B, n, obs_dim]; return how many are seen.

    Args:
        slots: [P]. missing: [B, n, N] bool, becomes True. where, nodes: [M], [M, D], the places of the seen nodes among
            the P·n·N, and their features.
    """
    n, n_nodes, dim = missing.shape[1], missing.shape[2], nodes.shape[1]
    found = 0
    for p in range(len(slots)):
        for a in range(n):
            features, misses = obs[slots[p], a], missing[slots[p], a]
            lives = False
            for f in range(len(features)):
                if features[f] != 0:
                    lives = True
            if not lives:
                continue
            for i in range(1, n_nodes):
                misses[i] = True
            for f in range(len(features)):
                if features[f] != 0:
                    misses[graph.node[f]] = False
            for i in range(n_nodes):
                if misses[i]:
                    continue
                where[found] = (p * n + a) * n_nodes + i
                for place in range(dim):
                    source = graph.source[i, place]
                    nodes[found, place] = features[source - 2] if source > 1 else np.float32(source)
                found += 1
    return found


@kernel
def remember(memory: Memory, mask: int, slots: Array, codes: Array, where: Array, missing: Array, rows: Array) -> int:
    """Add the tokens of this step; return the number of agents that miss a node, and write them, [F] of B·n, to `rows`.

    codes, where: [M], tokens of the seen nodes and their places among P·n·N. The others become `mask`.
    """
    past, (n, n_nodes) = memory.past, missing.shape[1:]
    last = len(past) - 1
    frames = 0
    for p in range(len(slots)):
        b = slots[p]
        for a in range(n):
            for k in range(last):
                for i in range(n_nodes):
                    past[k, b, a, i] = past[k + 1, b, a, i]
            misses = False
            for i in range(n_nodes):
                past[last, b, a, i] = mask
                misses |= missing[b, a, i]
            if misses:
                rows[frames] = b * n + a
                frames += 1
    for m in range(len(codes)):
        row = where[m] // n_nodes
        past[last, slots[row // n], row % n, where[m] % n_nodes] = codes[m]
    return frames


@kernel
def embed(t: Tables, memory: Memory, rows: Array, step: Array, missing: Array, x: Array, wanted: Array) -> int:
    """Write the embedded tokens of the agents `rows` [F] at `step` [B] to x, as `FrozenPredictor` does.

    Returns the number of missing nodes; `wanted` receives their rows in x, followed by zeros up to a multiple of
    `PLACES`. x: [at least F·L, d]; what follows is padding that no result depends on.
    """
    (n, n_nodes), d = missing.shape[1:], x.shape[1]
    length = t.static.shape[1] // d
    count = 0
    for f in range(len(rows)):
        b, a = rows[f] // n, rows[f] % n
        now = min(step[b], t.fact[LIMIT])
        for place in range(length):
            token = memory.past[place // n_nodes * t.fact[STRIP], b, a, place % n_nodes]
            for c in range(d):
                x[f * length + place, c] = t.static[now, place * d + c] + t.tokens[token, c]
        for i in range(n_nodes):
            if not missing[b, a, i]:
                continue
            row = (f + 1) * length - n_nodes + i
            wanted[count] = row
            count += 1
            if t.fact[LAST_SEEN]:
                seen, age = memory.last_step[b, a, i], 0
                if seen >= 0:
                    age = min(step[b] - seen, t.fact[LIMIT])
                for c in range(d):
                    x[row, c] += t.recall[memory.last_ids[b, a, i], c] + t.age[age, c]
    for m in range(count, count + -count % PLACES):
        wanted[m] = 0
    return count


@kernel
def fill(graph: Graph, slots: Array, missing: Array, sums: Array, stored: Array, obs: Array, rank: Array) -> None:
    """Decode the missing nodes and write them, rounded to float16, where nothing was seen.

    Args:
        sums: [M, at least D + 2], as of `FrozenPredictor.sums`. stored: [B, n, obs_dim] uint16, bits of float16.
        obs: [B, n, obs_dim]. rank: [N], working memory.
    """
    n, n_nodes, dim = missing.shape[1], missing.shape[2], graph.source.shape[1]
    passed = 0
    for p in range(len(slots)):
        b = slots[p]
        for a in range(n):
            before = passed
            for i in range(n_nodes):
                rank[i] = passed
                passed += missing[b, a, i]
            if passed == before:
                continue
            for f in range(len(graph.node)):
                if missing[b, a, graph.node[f]]:
                    of_node = sums[rank[graph.node[f]]]
                    if of_node[dim + 1] > HALF * of_node[dim]:  # dead
                        stored[b, a, f] = 0
                    else:
                        stored[b, a, f] = to_half(of_node[graph.column[f]] / of_node[dim])
                    obs[b, a, f] = from_half(stored[b, a, f])


@kernel
def commit(memory: Memory, n_codes: int, slots: Array, step: Array) -> None:
    """Record the tokens of this step as last seen at `step` [B], as `SlotHistory.commit`."""
    newest = memory.past[len(memory.past) - 1]
    for p in range(len(slots)):
        b = slots[p]
        for a in range(newest.shape[1]):
            for i in range(newest.shape[2]):
                if newest[b, a, i] < n_codes:
                    memory.last_ids[b, a, i], memory.last_step[b, a, i] = newest[b, a, i], step[b]


class CompiledTick:
    """Reconstructs one tick of the active slots; construct it again when the weights or the number of slots change.

    Args:
        layout: of the observations. n_agents, n_slots: n, B. tokenizer, predictor: of `decode: mean`, without the GRU.
    """

    def __init__(
        self, layout: EntityLayout, n_agents: int, n_slots: int, tokenizer: Callable[[torch.Tensor], torch.Tensor],
        predictor: FrozenPredictor,
    ) -> None:  # fmt: skip
        ready()
        self.n_slots = n_slots
        self._tokenizer, self._predictor = tokenizer, predictor
        self._graph, self._tables = graph_of(layout), tables_of(predictor)
        frames, (n_nodes, dim) = n_slots * n_agents, self._graph.source.shape
        nodes = frames * n_nodes
        self._nodes, self._where = torch.zeros(nodes, dim), np.zeros(nodes, np.int64)
        self._rows, self._rank = np.zeros(frames, np.int64), np.zeros(n_nodes, np.int64)
        together = min(frames, predictor.group) + ROUND
        self._x = torch.zeros(together * predictor.length, predictor.tokens.shape[1])
        self._wanted = torch.zeros(together * n_nodes + PLACES, dtype=torch.int64)

    def __call__(
        self, obs: np.ndarray, step: np.ndarray, slots: np.ndarray, history: SlotHistory
    ) -> tuple[np.ndarray, np.ndarray]:
        """Fill obs [B, n, obs_dim] float32 in place and advance `history` in the slot numbers `slots` [P] int64.

        step: [B] int64. Returns the stored field [B, n, obs_dim] float16, `guessed` [B, n, N] bool.
        """
        memory = Memory(history.past.numpy(), history.last_ids.numpy(), history.last_step.numpy())
        missing = np.zeros(memory.last_ids.shape, bool)
        stored = np.zeros(obs.shape, np.uint16)
        seen = look(self._graph, obs, slots, missing, self._where, self._nodes.numpy())
        codes, mask = self._tokenizer(self._nodes[:seen]).numpy(), int(self._tables.fact[CODES])
        frames = remember(memory, mask, slots, codes, self._where, missing, self._rows)
        if frames:
            parts = range(0, frames, self._predictor.group)
            sums = [self._sums(memory, self._rows[:frames][part : part + parts.step], step, missing) for part in parts]
            joined = sums[0] if len(sums) == 1 else np.concatenate(sums)
            fill(self._graph, slots, missing, joined, stored, obs, self._rank)
        commit(memory, mask, slots, step)
        return stored.view(np.float16), missing

    def _sums(self, memory: Memory, rows: np.ndarray, step: np.ndarray, missing: np.ndarray) -> np.ndarray:
        """Return the sums [M, ...] of the frames of the agents `rows` [F]."""
        frames = len(rows) + -len(rows) % ROUND
        x = self._x[: frames * self._predictor.length]
        count = embed(self._tables, memory, rows, step, missing, x.numpy(), self._wanted.numpy())
        wanted = self._wanted[: count + -count % PLACES]
        return self._predictor.sums(self._predictor.through_blocks(x, frames, wanted, count)).numpy()


def graph_of(layout: EntityLayout) -> Graph:
    """Return how observations of a layout become nodes."""
    source, place = GraphTables(layout, torch.device("cpu")).places()
    node, column = place // layout.node_dim, place % layout.node_dim
    return Graph(source.view(layout.n_nodes, -1).numpy(), node.numpy(), column.numpy())


def tables_of(predictor: FrozenPredictor) -> Tables:
    """Return the embeddings of a predictor."""
    codes = len(predictor.tokens) - N_SPECIAL
    fact = np.array([codes, predictor.limit, predictor.strip, predictor.last_seen], np.int64)
    none = torch.zeros(1, predictor.tokens.shape[1])
    last_seen = (predictor.recall, predictor.age) if predictor.last_seen else (none, none)
    static, tokens, recall, age = (
        table.detach().contiguous().numpy() for table in (predictor.static, predictor.tokens, *last_seen)
    )
    return Tables(static, tokens, recall, age, fact)


@lru_cache(maxsize=1)
def ready() -> None:
    """Compile or load the kernels, once per process."""
    compiler.prepare(_call_all)


def _call_all() -> None:
    """Call every kernel with the types that it always has."""
    numbers, one = np.zeros(1, np.int64), np.zeros((1, 1), np.int64)
    graph = Graph(one, numbers, numbers)
    memory = Memory(np.zeros((1, 1, 1, 1), np.int64), np.zeros((1, 1, 1), np.int64), np.zeros((1, 1, 1), np.int64))
    table, obs, missing = np.zeros((1, 1), np.float32), np.zeros((1, 1, 1), np.float32), np.zeros((1, 1, 1), bool)
    tables = Tables(table, table, table, table, np.zeros(4, np.int64))
    look(graph, obs, numbers, missing, numbers, table)
    remember(memory, 0, numbers, numbers[:0], numbers, missing, numbers)
    embed(tables, memory, numbers, numbers, missing, table, np.zeros(PLACES, np.int64))
    fill(graph, numbers, missing, np.ones((1, 3), np.float32), np.zeros((1, 1, 1), np.uint16), obs, numbers)
    commit(memory, 0, numbers, numbers)
