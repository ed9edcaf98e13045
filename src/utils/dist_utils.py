"""Ranks and collectives: the class `Dist`, and the only code that uses torch.distributed."""

from __future__ import annotations

import datetime
import gc
import os
import socket
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from omagd.utils.waits import Waits, exchange

# On purpose: see `_beside`.
warnings.filterwarnings("ignore", message="The AccumulateGrad node's stream does not match")

T = TypeVar("T")
DEFAULT_PORT = 12355
Store = dist.Store
LOOPBACK = "127.0.0.1"


Sum = Callable[[Tensor, Callable[[], None]], None]
"""Is given a tensor and what sums it over ranks, in place."""

_sum: ContextVar[Sum | None] = ContextVar("sum", default=None)


@contextmanager
def sums_by(given: Sum) -> Iterator[None]:
    """Let `given` do the sums over ranks in the block; it may note them for later."""
    token = _sum.set(given)
    try:
        yield
    finally:
        _sum.reset(token)


@dataclass(frozen=True)
class Dist:
    """The process group as seen from one rank; with `world_size == 1` every collective is the identity."""

    rank: int = 0
    world_size: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    waits: Waits = field(default_factory=Waits, compare=False, repr=False)

    @property
    def is_main(self) -> bool:
        """Whether this rank writes logs and models."""
        return self.rank == 0

    def sum(self, value: Tensor) -> Tensor:
        """Return the sum of `value` over all ranks (same shape, dtype and device)."""
        if self.world_size == 1:
            return value
        total = value.detach().clone()

        def reduce() -> None:
            with self.waits.counted():
                dist.all_reduce(total)

        reduce() if (given := _sum.get()) is None else given(total, reduce)
        return total

    def sum_later(self, value: Tensor) -> Pending:
        """Start the sum of `value` over all ranks and return at once."""
        if self.world_size == 1 or _sum.get() is not None:
            return Pending(self.sum(value), None)
        total = value.detach().clone()
        return Pending(total, dist.all_reduce(total, async_op=True), self.waits)

    def sum_int(self, value: int) -> int:
        """Return the sum of an integer over all ranks."""
        return int(self.sum(torch.tensor(value, dtype=torch.int64)))

    def counts(self, value: int) -> list[int]:
        """Return every rank's integer, in rank order, on every rank."""
        each = torch.zeros(self.world_size, dtype=torch.int64)
        each[self.rank] = value
        return self.sum(each).tolist()

    def all(self, flag: bool) -> bool:
        """Return whether `flag` holds on every rank."""
        return self.sum_int(int(flag)) == self.world_size

    def broadcast(self, value: T) -> T:
        """Return rank 0's `value` (picklable, small) on every rank."""
        if self.world_size == 1:
            return value
        box: list[Any] = [value]
        with self.waits.counted():
            dist.broadcast_object_list(box, src=0, device=self.device)
        return box[0]

    def gather(self, value: T) -> list[T]:
        """Return every rank's `value` (picklable, small), in rank order, on every rank."""
        if self.world_size == 1:
            return [value]
        out: list[Any] = [None] * self.world_size
        with self.waits.counted():
            dist.all_gather_object(out, value)
        return out

    def wrap(self, module: nn.Module, bucket_cap_mb: float = 25.0) -> nn.Module:
        """Return `module` in DDP, which gives it rank 0's weights and synchronises gradients; itself with one rank."""
        if self.world_size == 1:
            return module
        for parameter in module.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self.waits.note)
        self.waits.entered += 1
        with exchange(self.waits):
            return wrap_model_ddp(module, self.device.index, find_unused_parameters=False, bucket_cap_mb=bucket_cap_mb)

    def backward(self, loss: Tensor, wrapped: nn.Module) -> None:
        """Compute the gradients of `loss`, an output of `wrapped`.

        The time after this rank's last own gradient counts as waiting for the other ranks.
        """
        self.waits.known = None
        synchronised = isinstance(wrapped, DistributedDataParallel) and wrapped.require_backward_grad_sync
        if synchronised:
            self.waits.entered += 1
        with exchange(self.waits) if synchronised else nullcontext():
            loss.backward()
        self.waits.ticks += 1
        if self.waits.known is not None and synchronised:
            self.waits.add(self.waits.known)

    def apart(self, wrapped: nn.Module) -> AbstractContextManager[None]:
        """Return a context without synchronisation, in which a wrapped module accumulates its own gradients."""
        return wrapped.no_sync() if isinstance(wrapped, DistributedDataParallel) else nullcontext()


@dataclass
class Pending:
    """A sum in progress."""

    value: Tensor
    work: Any
    waits: Waits = field(default_factory=Waits)

    def wait(self) -> Tensor:
        """Wait for the sum and return it."""
        if self.work is not None:
            with self.waits.counted():
                self.work.wait()
            self.work = None
        return self.value


def open_rendezvous(wanted: int = DEFAULT_PORT) -> dist.TCPStore:
    """Return a store for the rendezvous of this host's ranks, on the port `wanted` or, if taken, a free one (`.port`).

    The parent keeps it until its ranks have ended, so no other job can take the port. It listens on the loopback
    interface only: a TCPStore would listen on every interface if it opened its own socket.
    """
    return _listening(LOOPBACK, wanted) or _listening(LOOPBACK, 0)  # type: ignore[return-value]  # port 0 raises instead


def _listening(host: str, port: int) -> dist.TCPStore | None:
    """Return a store that listens on one address of this host; None if it is not available."""
    endpoint = socket.socket()
    try:
        endpoint.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        endpoint.bind((host, port))
        endpoint.listen(1024)
    except OSError:
        endpoint.close()
        if port == 0:
            raise
        return None
    port = endpoint.getsockname()[1]
    return dist.TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=endpoint.detach())


def setup_distributed(
    rank: int,
    world_size: int,
    backend: str = "nccl",
    port: int | str = str(DEFAULT_PORT),
    timeout_minutes: float = 10,
    *,
    hosted: bool = False,
    attempt: int = 0,
) -> None:
    """Join the process group; without a GPU, gloo replaces NCCL.

    Under torchrun, MASTER_ADDR and MASTER_PORT are used; else the ranks meet on this host at `port`, where rank 0
    listens or, with `hosted`, the parent's `open_rendezvous`.

    attempt: number of restarts of all ranks; keys of earlier attempts in the store are ignored.
    """
    timeout = datetime.timedelta(minutes=timeout_minutes)
    if hosted:
        _stay_on_this_host()
    store = dist.PrefixStore(f"attempt_{attempt}", _meet(rank, int(port), timeout, hosted, host_it=rank == 0))
    if backend == "nccl":
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    with exchange(Waits()):
        dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)


def open_board(rank: int, port: int, timeout_minutes: float, *, hosted: bool, attempt: int) -> dist.Store:
    """Return a second connection to the store, which does not wait for requests on the first one."""
    timeout = datetime.timedelta(minutes=timeout_minutes)
    return dist.PrefixStore(f"attempt_{attempt}/board", _meet(rank, port, timeout, hosted, host_it=False))


def _meet(rank: int, port: int, timeout: datetime.timedelta, hosted: bool, host_it: bool) -> dist.TCPStore:
    """Return a connection to the store of all ranks; `host_it`: this rank may create it."""
    host = LOOPBACK
    if not hosted and {"RANK", "MASTER_ADDR"} <= os.environ.keys():
        host, port = os.environ["MASTER_ADDR"], int(os.environ.get("MASTER_PORT", port))
    agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True)
    if not host_it or hosted or agent:
        return dist.TCPStore(host, port, is_master=False, timeout=timeout, wait_for_workers=False)
    # The address may not belong to this host (NAT): then listen on every interface.
    store = _listening(host, port) or dist.TCPStore(host, port, is_master=True, wait_for_workers=False)
    store.set_timeout(timeout)
    return store


def _stay_on_this_host() -> None:
    """Restrict the connections between ranks to the loopback interface, unless the user has set another one."""
    names = [name for _, name in socket.if_nameindex() if name in {"lo", "lo0"}]
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        if names and variable not in os.environ:
            os.environ[variable] = names[0]


def cleanup_distributed() -> None:
    """Leave the process group, if any, and end its threads, which wrapped modules in cycles would keep alive."""
    if dist.is_available() and dist.is_initialized():
        gc.collect()
        dist.destroy_process_group()


def abort_distributed(patience: float = 5.0) -> None:
    """Abort this rank's exchanges after an error; other ranks would wait for it.

    Under NCCL an exchange in progress waits on the GPU, and leaving the group waits for the exchange. gloo closes its
    connections with the process. patience: seconds to wait for the abort.
    """
    if not (dist.is_available() and dist.is_initialized() and "nccl" in str(dist.get_backend_config())):
        return

    def abort() -> None:
        with suppress(RuntimeError):
            dist.group.WORLD.abort()  # type: ignore[union-attr]

    thread = threading.Thread(target=abort, name="abort", daemon=True)
    thread.start()
    thread.join(patience)


def get_rank() -> int:
    """Return this process's rank, 0 outside a group."""
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def get_world_size() -> int:
    """Return the number of ranks, 1 outside a group."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def is_main_process() -> bool:
    """Return whether this process is rank 0."""
    return get_rank() == 0


def reduce_mean(tensor: Tensor) -> Tensor:
    """Return the mean of `tensor` over all ranks."""
    size = get_world_size()
    return Dist(world_size=size).sum(tensor) / size if size > 1 else tensor


def wrap_model_ddp(
    model: nn.Module, device_id: int | None, find_unused_parameters: bool = True, *, bucket_cap_mb: float = 25.0
) -> nn.Module:
    """Wrap `model` in DDP, which synchronises gradients but not buffers.

    device_id: GPU of the model; ignored for a model on a CPU. find_unused_parameters: allow parameters that a forward
        does not use, at the cost of a search in each one.
    """
    on_gpu = device_id is not None and next(model.parameters()).device.type == "cuda"
    with warnings.catch_warnings():
        # torch 2.13 warns about a new name for this flag, which older supported versions do not have.
        warnings.filterwarnings("ignore", message=".*broadcast_buffers.*", category=FutureWarning)
        with _beside(device_id) if on_gpu else nullcontext():
            return DistributedDataParallel(
                model,
                device_ids=[device_id] if on_gpu else None,
                broadcast_buffers=False,
                find_unused_parameters=find_unused_parameters,
                bucket_cap_mb=bucket_cap_mb,
                gradient_as_bucket_view=True,
            )


@contextmanager
def _beside(device_id: int | None) -> Iterator[None]:
    """Launch the block's work on a stream of its own; what comes after it waits for it.

    Gradients accumulate on the stream on which DDP is made, and no CUDA graph can hold work of the default stream.
    """
    usual, own = torch.cuda.current_stream(device_id), torch.cuda.Stream(device_id)
    own.wait_stream(usual)
    with torch.cuda.stream(own):
        yield
    usual.wait_stream(own)


def unwrap_model(model: nn.Module) -> nn.Module:
    """Return the module without DDP, whose state has no `module.` prefix."""
    return model.module if isinstance(model, DistributedDataParallel) else model
