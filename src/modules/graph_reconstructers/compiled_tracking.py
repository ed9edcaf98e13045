"""A tick of the tracker while acting: its memory and the network's inputs by kernels, over living observers only.

The same as `TrackingReconstructor._tick` and `Tracker.encode` up to rounding: tests/test_tracker.py. Products and what
follows the state (`Tracker.decode`, `Tracker.belief`) are torch's. What dead observers remember stays as it was, since
nobody reads it.

Shapes: B slots, n agents, N nodes of which U = N - 1 are other units, D features of a node, A actions, F living
observers of the active slots, K = F·U rows, H hidden units, C = width of the summary.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from omagd.config.env_info import EntityLayout
from omagd.modules.graph_reconstructers.compiled import Array, Graph, from_half, graph_of, to_half
from omagd.modules.graph_reconstructers.tracker import N_FLAGS, N_PLACE, NEAR, SLOPE, Tracker, age_features
from omagd.modules.kernels import compiled_kernels
from omagd.utils.compiling import Compiler

compiler = Compiler(Path(__file__).resolve().parent, "kernels of the tracker", "about 3 s")
function, kernel = compiler.function, compiler.kernel

ZERO, ONE, NEGATIVE, CLOSE = np.float32(0.0), np.float32(1.0), np.float32(SLOPE), np.float32(NEAR)
ROWS_AT_ONCE = 1024  # rows that pass through the cell together, so that its gates stay in the cache


class Held(NamedTuple):
    """The state of all slots, as `TrackingReconstructor` keeps it.

    last: [B, n, N, D]. age: [B, n, N] int64. own: [B, n, D]. drift: [B, n, N, 2].
    """

    last: Array
    age: Array
    own: Array
    drift: Array


class Tables(NamedTuple):
    """What the inputs of the network are made of.

    mean, scale: [N, D]. of_action, of_change: [A, 2], [D, 2], the agent's own move. of_age: [ages, 2], hats: [steps,
    8], functions of the age and of the step. place: [2] int64, the columns of a position.
    """

    mean: Array
    scale: Array
    of_action: Array
    of_change: Array
    of_age: Array
    hats: Array
    place: Array


class Found(NamedTuple):
    """Of F observers: what `look` finds.

    rows: [F] int64, of B·n. age: [F, N] int64. missing: [F, N] bool. known: [F, known], base: [F, U, D] and inputs:
    [F·U, 2 D + 8], as in `Tracker.encode`.
    """

    rows: Array
    age: Array
    missing: Array
    known: Array
    base: Array
    inputs: Array


@function
def sees(graph: Graph, features: Array, missing: Array) -> bool:
    """Mark the nodes that an observer with these features misses; return whether it lives."""
    lives = False
    for i in range(len(missing)):
        missing[i] = i > 0
    for f in range(len(features)):
        if features[f] != 0:
            missing[graph.node[f]] = False
            lives = True
    return lives


@function
def remember(graph: Graph, features: Array, missing: Array, last: Array, ages: Array) -> None:
    """Write what is seen to last [N, D] and ages [N]."""
    for i in range(len(ages)):
        if missing[i]:
            ages[i] += ages[i] >= 0
            continue
        ages[i] = 0
        for d in range(last.shape[1]):
            source = graph.source[i, d]
            last[i, d] = features[source - 2] if source > 1 else np.float32(source)


@function
def move(t: Tables, action: int, now: Array, own: Array) -> tuple[np.float32, np.float32]:
    """Return the agent's own move, as `Tracker.moves`; own becomes `now` [D]."""
    to_x, to_y = ZERO, ZERO
    if action >= 0:
        to_x, to_y = t.of_action[action, 0], t.of_action[action, 1]
    for d in range(len(now)):
        to_x += t.of_change[d, 0] * (now[d] - own[d])
        to_y += t.of_change[d, 1] * (now[d] - own[d])
        own[d] = now[d]
    return to_x, to_y


@function
def expect(t: Tables, i: int, age: int, last: Array, drift: Array, base: Array, z: Array) -> None:
    """Write where node i is expected to base [D], and what the agent knows of it to z [D + 4]."""
    dim, old = len(base), min(max(age, 0), len(t.of_age) - 1)
    for d in range(dim):
        base[d] = last[d] if age >= 0 else t.mean[i, d]
    if age > 0:
        base[t.place[0]] += drift[0]
        base[t.place[1]] += drift[1]
    for d in range(dim):
        z[d] = (base[d] - t.mean[i, d]) / t.scale[i, d]
    z[dim], z[dim + 1] = ONE if age == 0 else ZERO, ONE if age < 0 else ZERO
    z[dim + 2], z[dim + 3] = t.of_age[old, 0], t.of_age[old, 1]


@function
def read(t: Tables, z: Array, base: Array, drift: Array, row: Array) -> None:
    """Write the inputs [2 D + 8] of a unit."""
    dim = len(base)
    x, y, end = base[t.place[0]], base[t.place[1]], 2 * dim + N_FLAGS
    for d in range(dim):
        row[d], row[dim + d] = z[d], z[d] * z[dim]
    for c in range(N_FLAGS):
        row[2 * dim + c] = z[dim + c]
    far = np.sqrt(x * x + y * y + CLOSE)
    row[end], row[end + 1] = far, max(ONE - far, ZERO)
    row[end + 2], row[end + 3] = drift[0], drift[1]


@kernel
def look(
    graph: Graph, t: Tables, obs: Array, slots: Array, step: Array, action: Array, held: Held, found: Found
) -> int:
    """Remember what the agents of the active slots see, and write what the network reads; return F.

    obs: [B, n, obs_dim]. slots: [P]. step: [B] int64. action: [B, n] int64, -1: none.
    """
    n, n_nodes, dim = held.age.shape[1], held.age.shape[2], held.last.shape[3]
    per_node, frames = dim + N_FLAGS, 0
    acted = n_nodes * per_node
    for p in range(len(slots)):
        b = slots[p]
        now = t.hats[min(step[b], len(t.hats) - 1)]
        for a in range(n):
            ages, last, drifts, known = held.age[b, a], held.last[b, a], held.drift[b, a], found.known[frames]
            missing = found.missing[frames]
            if not sees(graph, obs[b, a], missing):
                continue
            remember(graph, obs[b, a], missing, last, ages)
            to_x, to_y = move(t, action[b, a], last[0], held.own[b, a])
            for i in range(n_nodes):
                age, drift, z = ages[i], drifts[i], known[i * per_node : (i + 1) * per_node]
                drift[0] = drift[0] + to_x if age > 0 else ZERO
                drift[1] = drift[1] + to_y if age > 0 else ZERO
                found.age[frames, i] = age
                base = found.base[frames, max(i - 1, 0)]  # that of the agent itself is not kept
                expect(t, i, age, last[i], drift, base, z)
                if i:
                    read(t, z, base, drift, found.inputs[frames * (n_nodes - 1) + i - 1])
            for c in range(acted, len(known)):
                known[c] = ZERO
            if action[b, a] >= 0:
                known[acted + action[b, a]] = ONE
            known[acted + len(t.of_action) + a] = ONE
            for c in range(len(now)):
                known[acted + len(t.of_action) + n + c] = now[c]
            found.rows[frames] = b * n + a
            frames += 1
    return frames


@kernel
def enter(x: Array, context: Array, static: Array, steps: Array, rows: Array, step: Array) -> None:
    """Set the products x [F·U, H] of some observers to the cell's input.

    context: [F, H]. static: [n, U, H]. steps: [T, H]. rows: [F] of B·n. step: [B] int64.
    """
    n, units, width = static.shape
    for f in range(len(rows)):
        agent, now = rows[f] % n, steps[min(step[rows[f] // n], len(steps) - 1)]
        for c in range(width):
            context[f, c] += now[c]
        for u in range(units):
            out, of_all, of_unit = x[f * units + u], context[f], static[agent, u]
            for c in range(width):
                y = out[c] + of_all[c] + of_unit[c]
                out[c] = y if y > ZERO else NEGATIVE * y


@kernel
def regress(known: Array, where: Array, ages: Array, weight: Array, bias: Array, real: Array, out: Array) -> None:
    """Write the linear part to out [M, D]; features that a unit does not have (`real` [U, D]) stay as they are.

    known: [F, known]. where: [M], places among F·U. ages: [M], classes. weight: [6, U·D, known]. bias: [6, U·D].
    """
    units, dim = real.shape
    for m in range(len(where)):
        row, unit, age = known[where[m] // units], where[m] % units, ages[m]
        for d in range(dim):
            if not real[unit, d]:
                continue
            of_feature = weight[age, unit * dim + d]
            parts, rest = (ZERO, ZERO, ZERO, ZERO), len(row) % 4  # four sums that a processor adds side by side
            for k in range(0, len(row) - rest, 4):
                parts = (
                    parts[0] + row[k] * of_feature[k],
                    parts[1] + row[k + 1] * of_feature[k + 1],
                    parts[2] + row[k + 2] * of_feature[k + 2],
                    parts[3] + row[k + 3] * of_feature[k + 3],
                )
            total = bias[age, unit * dim + d] + (parts[0] + parts[1]) + (parts[2] + parts[3])
            for k in range(len(row) - rest, len(row)):
                total += row[k] * of_feature[k]
            out[m, d] = total


@kernel
def write(
    graph: Graph, rows: Array, missing: Array, features: Array, guessed: Array, stored: Array, obs: Array
) -> None:
    """Write the features [M, D] of the missing nodes, rounded to float16, where nothing was seen.

    rows: [F] of B·n. missing: [F, N]. guessed: [B, n, N] bool. stored: [B, n, obs_dim] uint16, bits of float16, all 0.
    obs: [B, n, obs_dim].
    """
    n, n_nodes = guessed.shape[1], guessed.shape[2]
    rank = 0
    for f in range(len(rows)):
        b, a, first = rows[f] // n, rows[f] % n, rank
        for i in range(n_nodes):
            guessed[b, a, i] = missing[f, i]
            rank += missing[f, i]
        if rank == first:
            continue
        for c in range(len(graph.node)):
            if missing[f, graph.node[c]]:
                place = first
                for i in range(graph.node[c]):
                    place += missing[f, i]
                stored[b, a, c] = to_half(features[place, graph.column[c]])
                obs[b, a, c] = from_half(stored[b, a, c])


class CompiledTracking:
    """Tracks one tick of the active slots, with the weights that the tracker has when this is constructed.

    Args:
        layout: of the observations. tracker: in float32 on a CPU. n_slots: B.
    """

    @torch.no_grad()
    def __init__(self, layout: EntityLayout, tracker: Tracker, n_slots: int) -> None:
        ready()
        self._tracker, self._graph, self._tables = tracker, graph_of(layout), tables_of(tracker)
        units, width, dim = tracker.n_nodes - 1, tracker.config.d_model, tracker.dim
        frames = n_slots * tracker.n_agents
        self._units, self._at_once = units, max(1, ROWS_AT_ONCE // units)
        self._found = Found(
            np.zeros(frames, np.int64), np.zeros((frames, units + 1), np.int64), np.zeros((frames, units + 1), bool),
            *(np.zeros(shape, np.float32) for shape in (
                (frames, tracker.n_known), (frames, units, dim), (frames * units, 2 * dim + N_FLAGS + N_PLACE))),
        )  # fmt: skip
        # The agent's own part reads places of `known`, so that one product gives it and the summary's hidden layer.
        own = torch.zeros(width, tracker.n_known)
        action = tracker.n_nodes * (dim + N_FLAGS)
        own[:, :dim], own[:, action : action + tracker.n_actions] = tracker.own.weight.split(
            [dim, tracker.n_actions], dim=1
        )
        self._first = torch.cat([tracker.summary.weight, own]).t().contiguous()
        self._first_bias = torch.cat([tracker.summary.bias, tracker.context.bias])
        self._context, self._node = tracker.context.weight.t().contiguous(), tracker.node.weight.t().contiguous()
        static = tracker.slot.weight.view(tracker.n_agents, units, width) + tracker.node.bias
        self._static, self._steps = static.contiguous().numpy(), tracker.step_table.weight.detach().numpy()
        self._regression = tracker.linear_weight.numpy(), tracker.linear_bias.numpy(), (tracker.real != 0).numpy()
        gru = tracker.gru
        self._from_x = (
            gru.weight_ih.roll(width, 0).t().contiguous()
        )  # [new | reset | update], as `gru_forward` reads them
        self._from_hidden = gru.weight_hh.t().contiguous()
        both = gru.bias_ih + gru.bias_hh
        bias = torch.cat([gru.bias_ih[2 * width :], both[: 2 * width], gru.bias_hh[2 * width :]])
        room = self._at_once * units
        self._of_x, self._of_hidden = torch.zeros(room, 3 * width), torch.zeros(room, 3 * width)
        none = np.zeros((0, 4 * width), np.float32)
        self._gru_room = bias.detach().numpy(), np.zeros(4 * width, np.float32), none
        self._x, self._after = torch.zeros(frames * units, width), torch.zeros(frames * units, width)

    def __call__(
        self, obs: Array, step: Array, slots: Array, action: Array, state: dict[str, Tensor]
    ) -> tuple[Array, Array]:
        """Fill obs [B, n, obs_dim] float32 in place and advance `state` in the slot numbers `slots` [P] int64.

        step: [B] int64. action: [B, n] int64. Returns the stored field [B, n, obs_dim] float16, and which nodes
        [B, n, N] are guesses.
        """
        held, hidden = Held(*(state[name].numpy() for name in Held._fields)), state["hidden"].flatten(0, 1)
        frames = look(self._graph, self._tables, obs, slots, step, action, held, self._found)
        rows = torch.from_numpy(self._found.rows[:frames])
        self._advance(frames, step, hidden.index_select(0, rows))
        size = frames * self._units
        after, x = (part[:size].view(frames, 1, self._units, part.shape[1]) for part in (self._after, self._x))
        hidden.index_copy_(0, rows, after[:, 0])
        base, known, age, missing = (
            torch.from_numpy(part[:frames]).unsqueeze(1)
            for part in (self._found.base, self._found.known, self._found.age, self._found.missing)
        )
        out = self._tracker.decode(after, x, base, known, age, missing, self._linear_part)
        belief = self._tracker.belief(out, age, missing)
        guessed, stored = np.zeros(held.age.shape, bool), np.zeros(obs.shape, np.uint16)
        features = belief.features.contiguous().numpy()
        write(self._graph, self._found.rows[:frames], self._found.missing[:frames], features, guessed, stored, obs)
        return stored.view(np.float16), guessed

    def _linear_part(self, known: Tensor, where: Tensor, ages: Tensor) -> Tensor:
        """Return `Tracker._linear_part` by a kernel."""
        out = known.new_zeros((len(where), self._tracker.dim))
        regress(known.numpy(), where.numpy(), ages.numpy(), *self._regression, out.numpy())
        return out

    def _advance(self, frames: int, step: Array, before: Tensor) -> None:
        """Compute the cell's input and its state after it, from the state `before` [F, U, H]."""
        kernels, width = compiled_kernels(), self._x.shape[1]
        assert kernels is not None
        both = torch.addmm(self._first_bias, torch.from_numpy(self._found.known[:frames]), self._first)
        context = torch.addmm(both[:, -width:], both[:, :-width].relu(), self._context)
        for first in range(0, frames, self._at_once):
            last = min(first + self._at_once, frames)
            here, k = slice(first * self._units, last * self._units), (last - first) * self._units
            x, h = self._x[here], before[first:last].view(k, width)
            torch.mm(torch.from_numpy(self._found.inputs[here]), self._node, out=x)
            some = self._found.rows[first:last]
            enter(x.numpy(), context[first:last].numpy(), self._static, self._steps, some, step)
            torch.mm(x, self._from_x, out=self._of_x[:k])
            torch.mm(h, self._from_hidden, out=self._of_hidden[:k])
            bias, room, none = self._gru_room
            products = self._of_x.numpy(), self._of_hidden.numpy()
            kernels.gru_forward((k, 0, 0, 0), *products, bias, h.numpy(), room, none, self._after[here].numpy())


def tables_of(tracker: Tracker) -> Tables:
    """Return the tables of a tracker."""
    ages = torch.arange(tracker.limit + 2, dtype=torch.float32)
    of_age = torch.stack(age_features(ages), dim=1)
    of_action, of_change = tracker.motion.weight.detach().t().split([tracker.n_actions, tracker.dim])
    hats = tracker.step_basis(torch.arange(tracker.limit + 1), torch.float32)
    parts = (tracker.mean, tracker.scale, of_action, of_change, of_age, hats)
    place = np.array(tracker.layout.position, np.int64)
    return Tables._make((*(part.contiguous().clone().numpy() for part in parts), place))


@lru_cache(maxsize=1)
def ready() -> None:
    """Compile or load the kernels, once per process."""
    compiler.prepare(_call_all)


def _call_all() -> None:
    """Call every kernel with the types that it always has."""
    numbers, one, flags = np.zeros(0, np.int64), np.zeros((1, 1), np.int64), np.zeros((1, 1), bool)
    line, block = np.zeros((1, 1), np.float32), np.zeros((1, 1, 1), np.float32)
    graph = Graph(one, numbers, numbers)
    held = Held(block[None], one[None], block, block[None])
    found = Found(numbers, one, flags, line, block, line)
    look(graph, Tables(line, line, line, line, line, line, numbers), block, numbers, numbers, one, held, found)
    enter(line, line, block, line, numbers, numbers)
    regress(line, numbers, numbers, block, line, flags, line)
    write(graph, numbers, flags, line, flags[None], np.zeros((1, 1, 1), np.uint16), block)
