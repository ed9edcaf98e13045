"""CUDA graphs on the simulated GPU: what is launched within a capture is noted, undone, and done again by `replay`.

As on a GPU, a replay reads and writes the tensors of the capture, numbers from the host are those of the capture, and
a capture fails where the host waits for the device or gives it other memory than numbers.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from simulated_gpu import CROSSING, WAITS, OnGPU
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Capture(TorchDispatchMode):
    """Notes what is launched on the simulated GPU while it is entered; afterwards nothing of that has happened."""

    def __init__(self) -> None:
        super().__init__()
        self.launched: list[tuple[Any, Any, Any, Any]] = []
        self._before: dict[int, tuple[Any, Any]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Do and note an operation."""
        kwargs = kwargs or {}
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        reads = [isinstance(tensor, OnGPU) for tensor in tensors]
        if any(reads) and func in WAITS:
            raise RuntimeError(f"{func}: not permitted when a stream is capturing")
        self._keep(func, args, kwargs)
        out = func(*args, **kwargs)
        made = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
        there = [isinstance(leaf, OnGPU) for leaf in made]
        mixed = not all(reads) and func in CROSSING
        if (any(reads) and (mixed or not all(there))) or (any(there) and reads and not any(reads)):
            raise RuntimeError(f"{func}: copies between host and device while a stream is capturing")
        if any(there) or any(reads):
            self.launched.append((func, args, kwargs, out))
        return out

    def _keep(self, func: Any, args: Any, kwargs: Any) -> None:
        """Keep what an operation overwrites, as it was before the capture."""
        for place, argument in enumerate(func._schema.arguments):
            if argument.alias_info is None or not argument.alias_info.is_write:
                continue
            given = args[place] if place < len(args) else kwargs.get(argument.name)
            for leaf in tree_leaves(given):
                if isinstance(leaf, OnGPU):
                    memory = leaf.value.untyped_storage()
                    self._before.setdefault(memory._cdata, (memory, memory.clone()))

    def undo(self) -> None:
        """Restore what was overwritten."""
        for memory, before in self._before.values():
            memory.copy_(before)

    def replay(self) -> None:
        """Do all operations again, into the same memory."""
        for func, args, kwargs, out in self.launched:
            if func.is_view:
                continue
            again = func(*args, **kwargs)
            for old, new in zip(tree_leaves(out), tree_leaves(again), strict=True):
                if isinstance(old, Tensor) and old is not new:
                    old.detach().copy_(new)


@contextlib.contextmanager
def simulated_graphs() -> Iterator[SimpleNamespace]:
    """Let CUDA graphs be captured on the simulated GPU; yields counters of captures, failed captures and replays."""
    seen = SimpleNamespace(captures=0, failed=0, replays=0)

    class Graph:
        def replay(self) -> None:
            seen.replays += 1
            with torch.no_grad():
                self.capture.replay()

    @contextlib.contextmanager
    def graph(which: Any, **_: Any) -> Iterator[None]:
        seen.captures += 1
        which.capture = Capture()
        try:
            with which.capture:
                yield
        except BaseException:
            seen.failed += 1
            raise
        finally:
            which.capture.undo()

    class Stream:
        def wait_stream(self, other: Any) -> None:
            """There is one stream."""

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: True)
        patch.setattr(torch.cuda, "Stream", lambda device=None: Stream())
        patch.setattr(torch.cuda, "current_stream", lambda device=None: Stream())
        patch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
        patch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 1))
        patch.setattr(torch.cuda, "CUDAGraph", Graph)
        patch.setattr(torch.cuda, "graph", graph)
        patch.setattr(Tensor, "pin_memory", lambda tensor: tensor)
        yield seen
