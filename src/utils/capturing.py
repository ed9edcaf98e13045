"""Capturing CUDA graphs."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


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
