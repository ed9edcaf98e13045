"""CUDA graphs: work of fixed shapes that is launched once and replayed."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor

from omagd.utils.dist_utils import sums_by

WARM_UP = 3  # calls before a graph is captured: kernels are compiled and libraries set up by then


@contextmanager
def captured(graph: torch.cuda.CUDAGraph, **more: Any) -> Iterator[None]:
    """Let `graph` hold what this thread launches in the block. more: arguments of `torch.cuda.graph`.

    Python's garbage collector works before, not within: if it removed an earlier graph there, the capture would fail.
    """
    enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        with torch.cuda.graph(graph, capture_error_mode="thread_local", **more):
            yield
    finally:
        if enabled:
            gc.enable()


class Segments:
    """Work of fixed shapes as CUDA graphs, with the sums over ranks between them, which only a replay computes.

    So ranks may capture at different times, and sums may pass through the host. more: arguments of `torch.cuda.graph`.
    """

    def __init__(self, **more: Any) -> None:
        self._more, self._open = more, ExitStack()
        self._parts: list[Callable[[], None]] = []
        self._sums: list[Tensor] = []  # of the last replay

    @contextmanager
    def captured(self) -> Iterator[None]:
        """Hold what this thread launches in the block."""
        with self._open, sums_by(self._between):
            self._begin()
            yield

    def _begin(self) -> None:
        graph = torch.cuda.CUDAGraph()
        self._open.enter_context(captured(graph, **self._more))
        self._parts.append(graph.replay)

    def _between(self, total: Tensor, reduce: Callable[[], None]) -> None:
        self._open.close()
        self._parts.append(reduce)
        self._sums.append(total)
        self._begin()

    def replay(self) -> None:
        """Launch the work once, and compute the sums."""
        for part in self._parts:
            part()

    def noted(self) -> AbstractContextManager[None]:
        """Return a context in which the same work, launched without a graph, takes its sums from the last replay."""
        sums = iter(self._sums)

        def given(total: Tensor, reduce: Callable[[], None]) -> None:
            total.copy_(next(sums))

        return sums_by(given)


class Captured:
    """Runs a function that only launches work of fixed shapes: on a GPU as a CUDA graph, after a few calls."""

    def __init__(self, function: Callable[[], None], device: torch.device) -> None:
        self._function = function
        self._calls_left = WARM_UP if device.type == "cuda" and torch.cuda.is_available() else -1
        self._graph: torch.cuda.CUDAGraph | None = None

    def __call__(self) -> None:
        """Run it once."""
        if self._graph is not None:
            self._graph.replay()
        elif self._calls_left:
            self._calls_left -= 1
            self._function()
        else:
            self._graph = torch.cuda.CUDAGraph()
            with captured(self._graph):
                self._function()
            self._graph.replay()
