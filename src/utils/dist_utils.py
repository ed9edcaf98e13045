"""Several processes as one: `Dist` is the value that everything else is handed; all of torch.distributed lives here."""

from __future__ import annotations

import datetime
import gc
import os
import socket
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

T = TypeVar("T")
DEFAULT_PORT = 12355
LOOPBACK = "127.0.0.1"
_STARTED = time.perf_counter()


@dataclass
class Waits:
    """How long this rank has been held up by exchanges with the others.

    Attributes:
        seconds: waited in all; the others' being late is part of it. calls: number of exchanges.
        known: moment at which the last gradient of this rank was computed.
        entered: exchanges that this rank has begun, the same number on all ranks that are as far.
        place: returns stage, phase and the moment at which the phase began.
        on_error: called with the error that ends this rank's run, before anything is closed.
        ticks: steps of environments and backward passes so far. playing: episodes are being played. inside: this rank
            is in an exchange. slots: returns the seeds of the slots that the environment works on, by slot, as far as
            it knows. asked: mask [B] and seeds [B] of the slots that a runner has asked the environment for.
    """

    seconds: float = 0.0
    calls: int = 0
    known: float | None = None
    entered: int = 0
    place: Callable[[], tuple[str, str, float]] = lambda: ("", "start", _STARTED)
    on_error: Callable[[BaseException], None] = lambda error: None
    ticks: int = 0
    playing: bool = False
    inside: bool = False
    slots: Callable[[], dict[int, int]] = dict
    asked: tuple[np.ndarray, np.ndarray] | None = None

    @contextmanager
    def doing(self, phase: str) -> Iterator[None]:
        """Within, this is where the rank is."""
        before, began = self.place, time.perf_counter()
        self.place = lambda: ("", phase, began)
        try:
            yield
        finally:
            self.place = before

    def enter(self) -> None:
        """Note that this rank begins an exchange with all others."""
        self.entered += 1

    def played(self, going_on: bool) -> None:
        """Count one step of the environments, or note that what was to be played has been."""
        self.ticks += 1
        self.playing = going_on
        if not going_on:
            self.asked = None

    def ask(self, which: np.ndarray, seeds: np.ndarray) -> None:
        """Note that the environment is asked for the slots `which` ([B] bool), whose episodes have `seeds` ([B])."""
        self.asked = which, seeds

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Count a block as one exchange."""
        self.enter()
        started = time.perf_counter()
        try:
            with _exchange(self):
                yield
        finally:
            self.add(started)

    def add(self, started: float) -> None:
        """Count one exchange that has held this rank up since `started`."""
        self.seconds += time.perf_counter() - started
        self.calls += 1

    def note(self, _: Tensor) -> None:
        """Remember that a gradient is known by now."""
        self.known = time.perf_counter()


@contextmanager
def _exchange(waits: Waits) -> Iterator[None]:
    """Mark an error of the block as one of an exchange: another rank may have caused it by its end."""
    waits.inside = True
    try:
        yield
    except RuntimeError as error:
        if not isinstance(error, torch.OutOfMemoryError):
            error.in_exchange = True  # type: ignore[attr-defined]
        raise
    finally:
        waits.inside = False


def broken_exchange(error: BaseException) -> BaseException | None:
    """Return the error that broke an exchange between the ranks: this one, or one it was raised from; None if none."""
    cause: BaseException | None = error
    while cause is not None and not getattr(cause, "in_exchange", False):
        cause = cause.__cause__ or cause.__context__
    return cause


@dataclass(frozen=True)
class Dist:
    """This process's place among W ranks; with `world_size == 1` every method is the identity.

    Args:
        rank, world_size: place and number. device: where this rank computes. waits: what exchanges have cost so far.
    """

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
        with self.waits.counted():
            dist.all_reduce(total)
        return total

    def sum_later(self, value: Tensor) -> Pending:
        """Start the sum of `value` over all ranks and return at once."""
        if self.world_size == 1:
            return Pending(value, None)
        total = value.detach().clone()
        self.waits.enter()
        return Pending(total, dist.all_reduce(total, async_op=True), self.waits)

    def sum_int(self, value: int) -> int:
        """Return the sum of a whole number over all ranks."""
        return int(self.sum(torch.tensor(value, dtype=torch.int64)))

    def counts(self, value: int) -> list[int]:
        """Return every rank's whole number, in rank order, on every rank."""
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
        """Return what to call for a synchronised forward: `module` itself alone, wrapped among several ranks."""
        if self.world_size == 1:
            return module
        for parameter in module.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self.waits.note)
        self.waits.enter()
        with _exchange(self.waits):
            return wrap_model_ddp(module, self.device.index, find_unused_parameters=False, bucket_cap_mb=bucket_cap_mb)

    def backward(self, loss: Tensor, wrapped: nn.Module) -> None:
        """Compute the gradients of `loss`, which came from `wrapped`.

        What passes between this rank's last own gradient and the end is the wait for the sums over all ranks.
        """
        self.waits.known = None
        synchronised = isinstance(wrapped, DistributedDataParallel) and wrapped.require_backward_grad_sync
        if synchronised:
            self.waits.enter()
        with _exchange(self.waits) if synchronised else nullcontext():
            loss.backward()
        self.waits.ticks += 1
        if self.waits.known is not None and synchronised:
            self.waits.add(self.waits.known)

    def apart(self, wrapped: nn.Module) -> AbstractContextManager[None]:
        """Return a context in which a wrapped module keeps its gradients to itself, for the next backward to add to."""
        return wrapped.no_sync() if isinstance(wrapped, DistributedDataParallel) else nullcontext()


@dataclass
class Pending:
    """A sum on its way."""

    value: Tensor
    work: Any
    waits: Waits = field(default_factory=Waits)

    def wait(self) -> Tensor:
        """Return the sum, waiting for it if needed."""
        if self.work is not None:
            with self.waits.counted():
                self.work.wait()
            self.work = None
        return self.value


def open_rendezvous(wanted: int = DEFAULT_PORT) -> dist.TCPStore:
    """Return where the ranks of this host will meet, on the port `wanted` if it is free, else on a free one (`.port`).

    The parent calls it once and keeps it until its ranks have ended: from here on no other job can take the port. Only
    this host reaches it: by itself a TCPStore listens on every interface, so it is handed a socket that does not.
    """
    return _listening(LOOPBACK, wanted) or _listening(LOOPBACK, 0)  # type: ignore[return-value]  # port 0 raises instead


def _listening(host: str, port: int) -> dist.TCPStore | None:
    """Return a store that listens at one address of this host alone, None where that is not to be had."""
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
    """Join the process group; NCCL needs a GPU, so a process that sees none joins by gloo.

    Under torchrun MASTER_ADDR and MASTER_PORT of the environment are used as they are; else the ranks meet on this host
    at `port`, where rank 0 listens, or, with `hosted`, the parent's `open_rendezvous`.

    attempt: how often all ranks have been started again; what an earlier attempt left in the store is not read.
    """
    timeout = datetime.timedelta(minutes=timeout_minutes)
    if hosted:
        _stay_on_this_host()
    store = dist.PrefixStore(f"attempt_{attempt}", _meet(rank, int(port), timeout, hosted, host_it=rank == 0))
    if backend == "nccl":
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    with _exchange(Waits()):
        dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)


def open_board(rank: int, port: int, timeout_minutes: float, *, hosted: bool, attempt: int) -> dist.Store:
    """Return a second connection to where the ranks have met, for what must not wait behind the first one."""
    timeout = datetime.timedelta(minutes=timeout_minutes)
    return dist.PrefixStore(f"attempt_{attempt}/board", _meet(rank, port, timeout, hosted, host_it=False))


def _meet(rank: int, port: int, timeout: datetime.timedelta, hosted: bool, host_it: bool) -> dist.TCPStore:
    """Return a connection to the store of all ranks; `host_it`: this rank holds it, unless somebody else does."""
    host = LOOPBACK
    if not hosted and {"RANK", "MASTER_ADDR"} <= os.environ.keys():
        host, port = os.environ["MASTER_ADDR"], int(os.environ.get("MASTER_PORT", port))
    agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True)
    if not host_it or hosted or agent:
        return dist.TCPStore(host, port, is_master=False, timeout=timeout, wait_for_workers=False)
    # Where the address is not one of this host's (behind a translation of addresses), every interface is left.
    store = _listening(host, port) or dist.TCPStore(host, port, is_master=True, wait_for_workers=False)
    store.set_timeout(timeout)
    return store


def _stay_on_this_host() -> None:
    """Let the ranks' own connections listen on the loopback interface alone, unless the user has named another."""
    names = [name for _, name in socket.if_nameindex() if name in {"lo", "lo0"}]
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        if names and variable not in os.environ:
            os.environ[variable] = names[0]


def cleanup_distributed() -> None:
    """Leave the process group, if there is one, and end its threads: wrapped modules in cycles would hold them."""
    if dist.is_available() and dist.is_initialized():
        gc.collect()
        dist.destroy_process_group()


def abort_distributed(patience: float = 5.0) -> None:
    """Break off this rank's exchanges after an error, so that no rank waits for one that does not come.

    Under NCCL an exchange in progress waits on the GPU, and leaving the group waits for it. gloo needs nothing: its
    connections close with the process. patience: seconds after which the abort itself is left to the process's end.
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
    if get_world_size() == 1:
        return tensor
    total = tensor.detach().clone()
    dist.all_reduce(total)
    return total / get_world_size()


def wrap_model_ddp(
    model: nn.Module,
    device_id: int | None,
    find_unused_parameters: bool = True,
    *,
    bucket_cap_mb: float = 25.0,
) -> nn.Module:
    """Wrap `model` so that its forward and backward synchronise gradients; buffers stay each rank's own business.

    device_id: the GPU that holds the model; ignored for a model on a CPU. find_unused_parameters: allow parameters that
        take no part in a forward, at the cost of a search in each one.
    """
    on_gpu = device_id is not None and next(model.parameters()).device.type == "cuda"
    with warnings.catch_warnings():
        # torch 2.13 announces a new name for this flag, which older supported versions do not know.
        warnings.filterwarnings("ignore", message=".*broadcast_buffers.*", category=FutureWarning)
        return DistributedDataParallel(
            model,
            device_ids=[device_id] if on_gpu else None,
            broadcast_buffers=False,
            find_unused_parameters=find_unused_parameters,
            bucket_cap_mb=bucket_cap_mb,
            gradient_as_bucket_view=True,
        )


def unwrap_model(model: nn.Module) -> nn.Module:
    """Return the bare module, whose state has no `module.` prefix."""
    return model.module if isinstance(model, DistributedDataParallel) else model
