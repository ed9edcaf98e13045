"""A simulated GPU: tensors that report `cuda:0`, hold their values on the CPU, and reject mixed devices.

It finds what a GPU refuses (tensors of two devices in one operation, `.numpy()`, CPU generators) and counts where the
host waits for the device. Operations compute what the CPU computes. It does not cover cuDNN, NCCL, streams, memory,
speed or the GPU's own rounding.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing

aten = torch.ops.aten
DEVICE = torch.device("cuda", 0)
# Operations that take tensors of two devices: copies, and rows chosen by an index from the CPU.
INDEXING = {aten.index.Tensor, aten.index_put_.default, aten.index_put.default}
CROSSING = {aten.copy_.default, aten._to_copy.default, *INDEXING}
# Operations at which the host waits for the device.
WAITS = {aten._local_scalar_dense.default, aten.nonzero.default, aten.masked_select.default, aten.bincount.default}
WAITS |= {aten._unique2.default, aten.equal.default, aten.repeat_interleave.Tensor}


def gru_cell(of_x: Tensor, of_h: Tensor, h: Tensor, b_x: Tensor, b_h: Tensor) -> tuple[Tensor, Tensor]:
    """Return the next state, and what the backward pass needs, as torch's operation for CUDA does."""
    x_r, x_z, x_n = (of_x + b_x).chunk(3, dim=1)
    h_r, h_z, m = (of_h + b_h).chunk(3, dim=1)
    r, z = (x_r + h_r).sigmoid(), (x_z + h_z).sigmoid()
    n = (x_n + r * m).tanh()
    return n + z * (h - n), torch.cat([r, z, n, h, m], dim=1)


def gru_cell_backward(grad: Tensor, kept: Tensor, has_bias: bool) -> tuple[Tensor | None, ...]:
    """Return the gradients of both products and of the state."""
    assert not has_bias
    r, z, n, h, m = kept.chunk(5, dim=1)
    of_n, of_z = grad * (1 - z) * (1 - n * n), grad * (h - n) * z * (1 - z)
    of_r = of_n * m * r * (1 - r)
    return torch.cat([of_r, of_z, of_n], dim=1), torch.cat([of_r, of_z, of_n * r], dim=1), grad * z, None, None


# Operations that no CPU has.
ONLY_ON_GPUS = {
    aten._thnn_fused_gru_cell.default: gru_cell, aten._thnn_fused_gru_cell_backward.default: gru_cell_backward,
}  # fmt: skip


class OnGPU(Tensor):
    """A tensor on the simulated GPU. value: the same on the CPU."""

    value: Tensor

    @staticmethod
    def __new__(cls, value: Tensor, requires_grad: bool = False) -> OnGPU:
        """Wrap a CPU tensor."""
        made = Tensor._make_wrapper_subclass(
            cls, value.shape, strides=value.stride(), storage_offset=value.storage_offset(), dtype=value.dtype,
            layout=value.layout, device="meta", requires_grad=requires_grad,
        )  # fmt: skip
        made.value = value.detach()
        return made

    # For torch's own code they are on "meta": a build without CUDA knows no autograd on "cuda".
    device = property(lambda self: DEVICE)
    is_cuda = property(lambda self: True)
    is_meta = is_cpu = property(lambda self: False)
    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Compute on the CPU."""
        return _run(func, args, kwargs or {}, None)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        """Return a copy, a parameter of a parameter."""
        if id(self) not in memo:
            copied = OnGPU(self.value.clone())
            is_parameter = isinstance(self, nn.Parameter)
            memo[id(self)] = nn.Parameter(copied, self.requires_grad) if is_parameter else copied
        return memo[id(self)]

    def __reduce_ex__(self, protocol: int) -> Any:
        """Pickle as the CPU tensor; this program always loads to the CPU."""
        return self.value.detach().clone().__reduce_ex__(protocol)

    def tolist(self) -> Any:
        """Return the values as Python numbers, as every device does."""
        return self.to("cpu").tolist()

    def __getitem__(self, key: Any) -> Tensor:
        """Return what `key` chooses; torch itself would make an index of a list on "meta", without its values."""
        return super().__getitem__(_index(key))

    def __setitem__(self, key: Any, value: Any) -> None:
        super().__setitem__(_index(key), value)


def _index(key: Any) -> Any:
    if isinstance(key, tuple):
        return tuple(map(_index, key))
    return torch.tensor(key, device=DEVICE) if isinstance(key, list) else key


class SimulatedGPU(TorchDispatchMode):
    """While it is entered, `device="cuda"` means the simulated GPU.

    Attributes:
        waits: how often the host has waited for the device, by operation. sent: copies from the host, waited for or
            not: a CUDA graph would repeat what was sent while it was captured.
    """

    def __init__(self) -> None:
        super().__init__()
        self.waits: Counter[str] = Counter()
        self.sent: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Compute on the CPU and put results on the device where they would be; no memory is pinned."""
        given = {name: value for name, value in (kwargs or {}).items() if name != "pin_memory"}
        crosses = func in {aten.copy_.default, aten._to_copy.default}
        source = args[1 if func is aten.copy_.default else 0] if crosses else None
        here = isinstance(source, Tensor) and not isinstance(source, OnGPU)
        if here and (isinstance(args[0], OnGPU) or torch.device(given.get("device") or "cpu").type != "cpu"):
            self.sent[str(func)] += 1
        return _run(func, args, given, self.waits)


def _run(func: Any, args: Any, kwargs: dict[str, Any], waits: Counter[str] | None) -> Any:
    tensors = [leaf for leaf in _leaves([args, *kwargs.values()]) if isinstance(leaf, Tensor)]
    ours = [tensor for tensor in tensors if isinstance(tensor, OnGPU)]
    wanted = kwargs.get("device")
    there = bool(ours) if wanted is None else torch.device(wanted).type in {"cuda", "meta"}
    if not ours and not there:
        return func(*args, **kwargs)
    if 0 < len(ours) < len(tensors) and func not in CROSSING:
        _require_one_device(func, tensors)
    if waits is not None:
        _count(waits, func, args, kwargs, there)
    if func is aten._fused_sdp_choice.default:
        return 0  # the plain formula, which is made of operations that every device has
    if RECORDING:
        _require_capturable(func, args, there)
    inside = {name: _inside(value) for name, value in kwargs.items()}
    if wanted is not None:
        inside["device"] = torch.device("cpu")
    given = _inside(args)
    for graph in RECORDING:
        graph.keep(func, given, inside)
    work = ONLY_ON_GPUS.get(func, func)
    out = work(*given, **inside)
    for graph in RECORDING:
        graph.work.append((work, given, inside, out))
    if there:
        out = _mapped(lambda leaf: OnGPU(leaf) if isinstance(leaf, Tensor) else leaf, out)
    if func is aten._to_copy.default or not ours:
        return out
    return return_and_correct_aliasing(func, args, kwargs, out)


class RecordedGraph:
    """Stands in for a CUDA graph: the operations of a capture, which a replay computes again into the same memory.

    What the host has decided or read meanwhile is not repeated, as with a real one. Memory is not reused, and streams
    do not exist.
    """

    def __init__(self) -> None:
        self.work: list[tuple[Any, Any, dict[str, Any], Any]] = []
        self._kept: list[tuple[Tensor, Tensor]] = []

    def keep(self, func: Any, args: Any, kwargs: dict[str, Any]) -> None:
        """Keep what an operation will overwrite: a capture itself computes nothing."""
        for place, argument in enumerate(func._schema.arguments):
            given = args[place] if place < len(args) else kwargs.get(argument.name)
            if argument.alias_info is not None and argument.alias_info.is_write:
                self._kept += [(value, value.clone()) for value in _leaves(given) if isinstance(value, Tensor)]

    def end(self) -> None:
        """End the capture."""
        while self._kept:
            value, before = self._kept.pop()
            value.copy_(before)

    def replay(self) -> None:
        """Compute all operations again."""
        for func, args, kwargs, out in self.work:
            again = func(*args, **kwargs)
            for old, new in zip(_leaves(out), _leaves(again), strict=True):
                if isinstance(old, Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)


RECORDING: list[RecordedGraph] = []


@contextlib.contextmanager
def _recording(graph: RecordedGraph, **_: Any) -> Iterator[None]:
    RECORDING.append(graph)
    try:
        yield
    finally:
        RECORDING.clear()
        graph.end()


def _require_capturable(func: Any, args: Any, there: bool) -> None:
    """Reject what ends a real capture: a value that the host reads, a copy from or to main memory."""
    crosses = func in {aten._to_copy.default, aten.copy_.default} and len(
        {isinstance(args[0], OnGPU), there if func is aten._to_copy.default else isinstance(args[1], OnGPU)}
    ) == 2  # fmt: skip
    if func in WAITS or crosses or func.namespace == "c10d":
        raise RuntimeError(f"operation not permitted when stream is capturing\n{func}")


@contextlib.contextmanager
def simulated_graphs() -> Iterator[SimulatedGPU]:
    """Enter `simulated_gpu`, with stand-ins for CUDA graphs."""
    stream = SimpleNamespace(wait_stream=lambda other: None)
    with simulated_gpu() as gpu, pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: True)
        patch.setattr(torch.cuda, "CUDAGraph", RecordedGraph)
        patch.setattr(torch.cuda, "graph", _recording)
        patch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
        patch.setattr(torch.cuda, "Stream", lambda device: stream)
        patch.setattr(torch.cuda, "current_stream", lambda device: stream)
        patch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
        patch.setattr(Tensor, "pin_memory", lambda tensor: tensor)
        yield gpu


def _inside(tree: Any) -> Any:
    return _mapped(lambda leaf: leaf.value if isinstance(leaf, OnGPU) else leaf, tree)


def _mapped(function: Callable[[Any], Any], tree: Any) -> Any:
    # torch's own, for trees of any kind, takes half of the time of an operation.
    return type(tree)([_mapped(function, e) for e in tree]) if isinstance(tree, tuple | list) else function(tree)


def _leaves(tree: Any) -> list[Any]:
    return [leaf for each in tree for leaf in _leaves(each)] if isinstance(tree, tuple | list) else [tree]


def _require_one_device(func: Any, tensors: list[Tensor]) -> None:
    """Reject CPU tensors next to ours, except single numbers in elementwise operations."""
    single = torch.Tag.pointwise in func.tags or "_foreach" in str(func)
    for tensor in tensors:
        if not isinstance(tensor, OnGPU) and not (single and tensor.dim() == 0):
            raise RuntimeError(f"{func}: tensors on cuda:0 and cpu (of shape {tuple(tensor.shape)})")


def _count(waits: Counter[str], func: Any, args: Any, kwargs: dict[str, Any], there: bool) -> None:
    """Count waits of the host: for a value, for a size that depends on values, for a copy from or to the CPU.

    A copy to the device makes the host wait unless it is `non_blocking`.
    """
    to_cpu = func is aten._to_copy.default and not there
    to_cpu |= func is aten.copy_.default and not isinstance(args[0], OnGPU) and isinstance(args[1], OnGPU)
    source = args[1] if func is aten.copy_.default else args[0] if func is aten._to_copy.default else None
    blocking = not (kwargs.get("non_blocking") or (func is aten.copy_.default and args[2:3] == (True,)))
    upload = blocking and there and isinstance(source, Tensor) and not isinstance(source, OnGPU)
    places = [t for t in _leaves(args[1:2]) if isinstance(t, Tensor)] if func in INDEXING else []
    by_mask = func is aten.index.Tensor and any(t.dtype == torch.bool for t in places)
    sent = any(not isinstance(t, OnGPU) for t in places)
    if func in WAITS or to_cpu or upload or by_mask or sent:
        waits[str(func)] += 1


def _set_grad(enabled: bool) -> bool:
    before = torch.is_grad_enabled()
    torch.set_grad_enabled(enabled)
    return before


@contextlib.contextmanager
def simulated_gpu() -> Iterator[SimulatedGPU]:
    """Enter the mode; CUDA's random state and autocast work without a card."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: False)  # of the machine's own card, which is not simulated
        patch.setattr(torch.cuda, "is_initialized", lambda: False)
        patch.setattr(torch.cuda, "_lazy_init", lambda: None)
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: bool(RECORDING))
        patch.setattr(torch.cuda, "get_rng_state", lambda device="cuda": torch.get_rng_state())
        patch.setattr(torch.cuda, "set_rng_state", lambda state, device="cuda": None)
        patch.setattr(torch.cuda.amp.common, "amp_definitely_not_available", lambda: False)
        patch.setattr(torch.cuda, "is_bf16_supported", lambda *_: True)
        # Inference mode dispatches composite operations undecomposed; `no_grad` decomposes them.
        patch.setattr(torch.inference_mode, "__enter__", lambda self: vars(self).update(grad=_set_grad(False)))
        patch.setattr(torch.inference_mode, "__exit__", lambda self, *_: torch.set_grad_enabled(self.grad))
        patch.setattr(torch.__future__, "get_overwrite_module_params_on_conversion", lambda: True)
        lifts = torch._C._only_lift_cpu_tensors()
        torch._C._set_only_lift_cpu_tensors(True)  # `torch.tensor` makes on the CPU, then moves by an operation
        try:
            with SimulatedGPU() as mode:
                yield mode
        finally:
            torch._C._set_only_lift_cpu_tensors(lifts)
