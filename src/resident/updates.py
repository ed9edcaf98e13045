"""Updates of fixed shapes: on a GPU each shape becomes a CUDA graph, which is replayed for other episodes.

A graph holds everything that an update launches: reading the drawn episodes, both unrolls, mixers, targets, loss,
backward, clipping and the optimizer. The host copies the numbers of the drawn episodes and replays; it reads nothing.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Hashable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor

from omagd.config.schema import Config
from omagd.learners.protocol import FixedLearner, has_fixed_shapes, learner_class
from omagd.learners.synced_optimizer import Stats
from omagd.resident.graphs import captured
from omagd.resident.replay import FixedDraw
from omagd.utils.dist_utils import Dist
from omagd.utils.errors import UserError
from omagd.utils.logging import PACKAGE

LOG = logging.getLogger(PACKAGE)

WARM_UP = 2  # updates of a shape before it is captured: kernels are loaded, and the optimizer has its state by then
Inputs = tuple[Tensor, ...]
TOLERANCE = 0.01  # of a graph's first update to the same update without it, in what the optimizer's averages moved by


def _problems(config: Config, world_size: int, kind: type[Any] | None = None) -> list[str]:
    """Return what keeps a run's updates from fixed shapes and CUDA graphs, empty for nothing.

    kind: the learner of stage 1 or 2, whose episodes need no replay.
    """
    other = not has_fixed_shapes(kind or learner_class(config.learner))
    name = f"learner={config.learner}" if kind is None else kind.__name__
    problems = {
        f"learns from the replay of runner=resident, not of runner={config.runner}": not kind
        and config.runner != "resident",
        "needs the replay on the device: buffer_cpu_only=False": not kind and config.buffer_cpu_only,
        # Gradients of other ranks come through the host (gloo) or from a thread that no capture sees (the watchdog of
        # NCCL), and DDP would wait for its hooks.
        f"works on one rank, not {world_size}": world_size > 1,
        "cannot recompute activations: enable_gradient_checkpointing=False": config.enable_gradient_checkpointing,
        # Groups of the same size are solved together, and each batch has other ones.
        "cannot match units: mask_predictor_config.matching=none": kind is not None
        and config.mask_predictor_config.matching == "type",
        f"is not for {name}, which has no update of fixed shapes": other,
    }
    return [problem for problem, found in problems.items() if found]


def uses_graph_updates(config: Config, device: torch.device, world_size: int) -> bool:
    """Return whether a run learns by updates of fixed shapes: where it says so, or by default on a GPU if it can."""
    wanted = device.type == "cuda" if config.graph_updates is None else config.graph_updates
    return wanted and not _problems(config, world_size)


def pretrains_in_fixed_shapes(config: Config, dist: Dist, kind: type[Any], needed: float) -> tuple[bool, str]:
    """Return whether a learner of stage 1 or 2 has updates of fixed shapes, and why not where they are wanted.

    needed: bytes of the episodes, of which a GPU must have four times as many free.
    """
    on_gpu = dist.device.type == "cuda"
    if not (on_gpu if config.graph_updates is None else config.graph_updates):
        return False, ""
    found = _problems(config, dist.world_size, kind)
    free = torch.cuda.mem_get_info(dist.device)[0] if on_gpu and torch.cuda.is_available() else math.inf
    free = min(free, (config.max_memory_per_gpu_gb or math.inf) * 2**30)
    if 4 * needed > free:
        found.append(f"needs {needed / 2**30:.1f} GB of episodes on the device, of {free / 2**30:.1f} GB free")
    return not found, found[0] if found else ""


def check_graph_updates(config: Config, world_size: int) -> None:
    """Reject `graph_updates=True` where updates cannot have fixed shapes. Errors: UserError."""
    if config.graph_updates and (problems := _problems(config, world_size)):
        raise UserError(f"graph_updates=True: {problems[0]}. Leave it out")


@dataclass
class Shape:
    """What is known about updates of one shape.

    Attributes:
        done: updates without a graph. names: of the stats. values: [2 x stats] float64, written by each replay.
    """

    done: int = 0
    graph: torch.cuda.CUDAGraph | None = None
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
        stats = self._stats(draw)
        self._learner.finish(episodes)
        return stats

    def _stats(self, draw: FixedDraw) -> Stats:
        inputs = self._load(self._learner.fixed_inputs(draw))
        if not self._captures:
            return self._learner.learn_fixed(draw, inputs)
        states = [step.optimizer.state for step in self._steps]  # which a resumed run replaces
        if self._layout != draw.buffer.layout() or any(a is not b for a, b in zip_longest(self._states, states)):
            self._forget()
            self._layout, self._states = draw.buffer.layout(), states
        # A schedule of the learning rate makes a graph for each value.
        rates = tuple(group["lr"] for step in self._steps for group in step.optimizer.param_groups)
        shape = self._shapes.setdefault((draw.rows, _shapes(inputs), rates), Shape())
        if shape.graph is not None:
            return self._replay(shape)
        if shape.done >= WARM_UP:
            return self._capture(shape, draw, inputs)
        shape.done += 1
        return self._aside(draw, inputs)

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

    def _capture(self, shape: Shape, draw: FixedDraw, inputs: Inputs) -> Stats:
        """Make the graph of a shape, compare its first update with the same one without it, and return that one's."""
        try:
            graph = self._made(shape, draw, inputs)
        except RuntimeError as problem:
            return self._give_up(str(problem).strip().partition("\n")[0], draw, inputs)
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
        stats = self._aside(draw, inputs)
        apart, moved = _distance(replayed, averages), _distance(before[: len(averages)], averages)
        if not bool(apart <= TOLERANCE * moved):  # once for each shape
            return self._give_up("its first update differs from the same one without it", draw, inputs, stats)
        shape.graph = graph
        return stats

    def _made(self, shape: Shape, draw: FixedDraw, inputs: Inputs) -> torch.cuda.CUDAGraph:
        """Return the graph of a shape, whose outputs `shape` notes. Errors: RuntimeError for work that has none."""
        graph = torch.cuda.CUDAGraph()
        # A failed capture leaves its stream current; the outer block restores this one.
        with torch.cuda.stream(torch.cuda.current_stream(self._device)), ExitStack() as stack:
            for step in self._steps:
                stack.enter_context(_capturable(step.optimizer))
            with captured(graph, pool=self._pool, stream=self._side):
                stats = self._learner.learn_fixed(draw, inputs)
                values = [value.detach().reshape(()).double() for pair in stats.values() for value in pair]
                shape.names, shape.values = tuple(stats), torch.stack(values)
        return graph

    def _give_up(self, reason: str, draw: FixedDraw, inputs: Inputs, stats: Stats | None = None) -> Stats:
        """Say that no graphs are used from here on; return `stats`, or those of an update without a graph."""
        LOG.warning(
            "updates are launched one operation at a time, which is slower: a CUDA graph of them failed (%s)."
            " graph_updates=False packs batches instead",
            reason,
        )
        for step in self._steps:
            step.optimizer.zero_grad(set_to_none=True)
        self._captures = False
        self._shapes.clear()
        return self._learner.learn_fixed(draw, inputs) if stats is None else stats


def _shapes(inputs: Inputs) -> Hashable:
    return tuple(value.shape for value in inputs)


def _distance(one: Sequence[Tensor], other: Sequence[Tensor]) -> Tensor:
    """Return the Euclidean norm of the difference of two lists of tensors, of which scalars do not count."""
    return torch.stack([(a - b).norm() for a, b in zip(one, other, strict=True) if a.dim()]).norm()


@contextmanager
def _capturable(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Let an optimizer whose state is on the device step within a capture; its saved state keeps its form."""
    kept = [group.get("capturable") for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["capturable"] = True
    try:
        yield
    finally:
        for group, value in zip(optimizer.param_groups, kept, strict=True):
            group["capturable"] = value
