"""Updates of fixed shapes: on a GPU each shape becomes a CUDA graph, which is replayed for other episodes.

A graph holds everything that an update launches: reading the drawn episodes, both unrolls, mixers, targets, loss,
backward, clipping and the optimizer. The host copies the numbers of the drawn episodes and replays; it reads nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor

from omagd.config.schema import Config
from omagd.learners.protocol import FixedLearner, has_fixed_shapes, learner_class
from omagd.learners.synced_optimizer import Stats, SyncedOptimizer
from omagd.resident.graphs import Segments
from omagd.resident.replay import FixedDraw
from omagd.utils.logging import PACKAGE

LOG = logging.getLogger(PACKAGE)

WARM_UP = 2  # updates of a shape before it is captured: kernels are loaded, and the optimizer has its state by then
Inputs = tuple[Tensor, ...]
TOLERANCE = 0.01  # of a graph's first update to the same update without it, in what the optimizer's averages moved by


def why_packed(config: Config, kind: type[Any] | None = None) -> str:
    """Return why a run on a GPU learns from packed batches, "" where its updates have fixed shapes.

    kind: the learner of stage 1 or 2; None: that of stage 3.
    """
    fixed = has_fixed_shapes(kind or learner_class(config.learner))
    problems = {
        "graph_updates=False": config.graph_updates is False,
        f"{kind.__name__ if kind else f'learner={config.learner}'} has no update of fixed shapes": not fixed,
        "use_per=True draws by the errors of the update before": kind is None and config.use_per,
        # Groups of the same size are solved together, and each batch has other ones.
        "mask_predictor_config.matching=type matches units": kind is not None
        and config.mask_predictor_config.matching == "type",
    }
    return next((problem for problem, found in problems.items() if found), "")


@dataclass
class Shape:
    """What is known about updates of one shape.

    Attributes:
        done: updates without a graph. names: of the stats. values: [2 x stats] float64, written by each replay.
    """

    done: int = 0
    graph: Segments | None = None
    names: tuple[str, ...] = ()
    values: Tensor | None = None


class FixedUpdates:
    """A learner's `update` for drawn episodes: on a GPU by CUDA graphs after a few updates, on a CPU as it is.

    All graphs share one pool of memory, about as much as one update of the longest episodes takes. They hold the
    addresses of the replay and of the optimizer's state, and are made again when these have moved.
    """

    def __init__(self, learner: FixedLearner) -> None:
        self._learner, self._steps, self._device = learner, learner.steps(), learner.device
        self._captures = self._device.type == "cuda" and torch.cuda.is_available()
        self._packs = False  # whether packed batches are learned from, since graphs could not be made
        self._ranks = max(step.dist.world_size for step in self._steps)
        for step in self._steps:
            step.sums_once = self._ranks > 1
        groups = [group for step in self._steps for group in step.optimizer.param_groups]
        self._rates = [torch.zeros((), device=self._device) for _ in groups] if self._captures else []
        self._inputs: dict[Hashable, Inputs] = {}
        self._forget()

    def _forget(self) -> None:
        """Drop all graphs."""
        self._shapes: dict[Hashable, Shape] = {}
        self._layout: Hashable = None
        self._states: list[object] = []
        self._side = torch.cuda.Stream(self._device) if self._captures else None
        self._pool = torch.cuda.graph_pool_handle() if self._captures else None

    def update(self, draw: FixedDraw, *, episodes: int) -> Stats:
        """Take one step on the drawn episodes, as the learner's `update` does on a batch of them."""
        stats = None if self._packs else self._stats(draw)
        if stats is None:
            return self._learner.update(draw.packed(), episodes=episodes)
        self._learner.finish(episodes)
        return stats

    def _stats(self, draw: FixedDraw) -> Stats | None:
        """Return the stats of an update of fixed shapes, None where it was given up before it changed anything."""
        inputs = self._load(self._learner.fixed_inputs(draw))
        with _capturable(self._steps, self._rates):
            return self._launched(draw, inputs) if self._captures else self._learner.learn_fixed(draw, inputs)

    def _launched(self, draw: FixedDraw, inputs: Inputs) -> Stats | None:
        states: list[object] = [step.optimizer.state for step in self._steps]  # which a resumed run replaces
        if self._layout != draw.buffer.layout() or any(a is not b for a, b in zip_longest(self._states, states)):
            self._forget()
            self._layout, self._states = draw.buffer.layout(), states
        shape = self._shapes.setdefault((draw.rows, _shapes(inputs)), Shape())
        if shape.graph is not None:
            return self._replay(shape)
        try:
            if shape.done >= WARM_UP:
                return self._capture(shape, draw, inputs)
            shape.done += 1
            return self._aside(draw, inputs)
        except (RuntimeError, IndexError) as problem:  # no memory, or a plug-in that cannot read these batches
            if self._ranks > 1:  # which would wait for sums that this one has had
                raise
            self._give_up(problem)
            return None

    def _load(self, given: Inputs) -> Inputs:
        """Return the inputs of an update on the device; inputs of equal shapes are always at the same addresses."""
        key = _shapes(given)
        if key not in self._inputs:
            self._inputs[key] = tuple(torch.empty_like(value, device=self._device) for value in given)
        for there, value in zip(self._inputs[key], given, strict=True):
            there.copy_(value.pin_memory() if self._captures else value, non_blocking=True)
        return self._inputs[key]

    def _aside(self, draw: FixedDraw, inputs: Inputs) -> Stats:
        """Learn without a graph on the stream of the captures, so that backward's nodes belong to it."""
        assert self._side is not None
        main = torch.cuda.current_stream(self._device)
        self._side.wait_stream(main)
        with torch.cuda.stream(self._side):
            stats = self._learner.learn_fixed(draw, inputs)
        main.wait_stream(self._side)
        return stats

    def _replay(self, shape: Shape) -> Stats:
        assert shape.graph is not None
        assert shape.values is not None
        shape.graph.replay()
        for step in self._steps:
            step.replayed()
        values = iter(shape.values.clone())  # the next replay overwrites them
        return {name: (next(values), next(values)) for name in shape.names}

    def _capture(self, shape: Shape, draw: FixedDraw, inputs: Inputs) -> Stats | None:
        """Make the graph of a shape, compare its first update with the same one without it, and return that one's."""
        try:
            graph = self._made(shape, draw, inputs)
        except RuntimeError as problem:
            self._give_up(problem)
            return self._learner.learn_fixed(draw, inputs) if self._ranks > 1 else None
        weights = [v for step in self._steps for v in (*step.parameters, *step.loss_module.buffers())]
        moments = (held.values() for step in self._steps for held in step.optimizer.state.values())
        averages = [value for held in moments for value in held if isinstance(value, Tensor)]
        # A graph repeats what the host decided while it was captured, which may be wrong for other episodes. So its
        # first update is undone and taken again without it, and both must agree.
        before = [value.detach().clone() for value in (*averages, *weights)]
        with torch.random.fork_rng(devices=[self._device] if self._device.type == "cuda" else []):  # dropout, twice
            graph.replay()
        replayed = [value.clone() for value in averages]
        with torch.no_grad():
            for value, old in zip((*averages, *weights), before, strict=True):
                value.copy_(old)
        with graph.noted():  # the other ranks do not sum again
            stats = self._aside(draw, inputs)
        apart, moved = _distance(replayed, averages), _distance(before[: len(averages)], averages)
        if not bool(apart <= TOLERANCE * moved):  # once for each shape
            self._give_up("its first update differs from the same one without it")
        shape.graph = graph
        return stats

    def _made(self, shape: Shape, draw: FixedDraw, inputs: Inputs) -> Segments:
        """Return the graph of a shape, whose outputs `shape` notes. Errors: RuntimeError for work that has none."""
        graph = Segments(pool=self._pool, stream=self._side)
        # A failed capture leaves its stream current; the outer block restores this one.
        with torch.cuda.stream(torch.cuda.current_stream(self._device)), graph.captured():
            stats = self._learner.learn_fixed(draw, inputs)
            values = [value.detach().reshape(()).double() for pair in stats.values() for value in pair]
            shape.names, shape.values = tuple(stats), torch.stack(values)
        return graph

    def _give_up(self, reason: object) -> None:
        """Learn without graphs from here on, and say so: several ranks as before, with equal sums; one from packed."""
        LOG.warning(
            "updates go on %s, which is slower: a CUDA graph of them failed (%s). graph_updates=False packs batches",
            "one operation at a time" if self._ranks > 1 else "from packed batches",
            str(reason).strip().partition("\n")[0],
        )
        for step in self._steps:
            step.optimizer.zero_grad(set_to_none=True)
        self._captures, self._packs = False, self._ranks == 1
        self._forget()


def _shapes(inputs: Inputs) -> Hashable:
    return tuple(value.shape for value in inputs)


def _distance(one: Sequence[Tensor], other: Sequence[Tensor]) -> Tensor:
    """Return the Euclidean norm of the difference of two lists of tensors, of which scalars do not count."""
    return torch.stack([(a - b).norm() for a, b in zip(one, other, strict=True) if a.dim()]).norm()


@contextmanager
def _capturable(steps: Sequence[SyncedOptimizer], rates: Sequence[Tensor]) -> Iterator[None]:
    """Let optimizers step within a capture, by learning rates on the device: a graph follows their schedule.

    Saved states keep their form. Without `rates` nothing changes.
    """
    groups = [group for step in steps for group in step.optimizer.param_groups]
    kept = [(group["lr"], group.get("capturable")) for group in groups]
    for group, there in zip(groups, rates, strict=False):
        group.update(lr=there.fill_(group["lr"]), capturable=True)
    try:
        yield
    finally:
        for group, (rate, capturable) in zip(groups, kept, strict=True):
            group.update(lr=rate, capturable=capturable)
