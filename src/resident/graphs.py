"""CUDA graphs: work of fixed shapes that is launched once and replayed."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

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
