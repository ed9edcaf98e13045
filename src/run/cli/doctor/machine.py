"""The machine: processors, GPUs, memory, disks, limits, ports."""

from __future__ import annotations

import os
import resource
import shutil
import socket
import tempfile
from pathlib import Path

from omagd.run.cli.doctor.findings import Finding, Settings, missing, ok, warning
from omagd.utils.errors import UserError

GIGABYTE = 2.0**30
LEAST_DISK, LEAST_MEMORY, LEAST_SHARED = 2.0, 2.0, 0.25
LEAST_FILES, LEAST_PROCESSES = 1024, 512
SHARED = Path("/dev/shm")


def torch(settings: Settings) -> Finding:
    """Look whether torch computes."""
    import torch as library

    if float((library.ones(2, 2) @ library.ones(2, 2)).sum()) != 8.0:
        return missing(f"{library.__version__} computes wrongly", "install another build of torch (pytorch.org)")
    one = "oneDNN" if library.backends.mkldnn.is_available() else "no oneDNN"
    text = f"{library.__version__} ({one}), torch_threads={settings.torch_threads} for each rank"
    cores, threads = _cores(), settings.torch_threads * settings.ranks
    if threads > cores:
        mend = f"lower torch_threads to {max(1, cores // settings.ranks)}"
        return warning(f"{text}, {threads} in all on {cores} cores", mend)
    return ok(text)


def gpu(_settings: Settings) -> Finding:
    """Look at CUDA, the cards and NCCL."""
    import torch

    if not torch.cuda.is_available():
        if shutil.which("nvidia-smi"):
            built = f"CUDA {torch.version.cuda}" if torch.version.cuda else "no CUDA"
            mend = "install a build that fits the driver: https://pytorch.org/get-started/locally"
            return warning(f"there is a driver (nvidia-smi), but torch finds no card; it is built with {built}", mend)
        return ok("none: runs compute on CPUs")
    cards = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    names = ", ".join(f"{card.name} {card.total_memory / GIGABYTE:.0f} GB" for card in cards)
    nccl = ".".join(map(str, torch.cuda.nccl.version()))
    return ok(f"{len(cards)} ({names}), CUDA {torch.version.cuda}, NCCL {nccl}")


def bf16(_settings: Settings) -> Finding:
    """Look whether precision=bf16 would be served."""
    import torch

    from omagd.run.training.device import check_bf16

    try:
        check_bf16("precision", torch.cuda.is_available())
    except UserError as error:
        return ok(f"no: {error.message.partition(': ')[2]}, the default")
    return ok("precision=bf16 can be used")


def compiler(_settings: Settings) -> Finding:
    """Look whether compile=True would be served on a CPU."""
    from omagd.run.training.device import check_compiler

    try:
        check_compiler()
    except UserError as error:
        return missing(error.message, "apt-get install g++ python3-dev")
    return ok("compile=True can be used")


def cores(settings: Settings) -> Finding:
    """Look at the processors that this process may use."""
    return ok(f"{_cores()} for {settings.ranks} rank(s), load {os.getloadavg()[0]:.1f}")


def memory(_settings: Settings) -> Finding:
    """Look at what main memory is left."""
    from omagd.run.memory_budget import available_bytes

    left = available_bytes()
    if left is None:
        return warning("the system does not tell", "watch memory/rss_mb in the log")
    text = f"{left / GIGABYTE:.1f} GB left"
    return ok(text) if left >= LEAST_MEMORY * GIGABYTE else warning(text, "lower buffer_size and batch_size_run")


def shared_memory(_settings: Settings) -> Finding:
    """Look whether environments in processes can share memory."""
    with tempfile.TemporaryFile(dir=SHARED) as file:
        file.write(b"omagd")
    room = os.statvfs(SHARED)
    left = room.f_bavail * room.f_frsize / GIGABYTE
    text = f"{SHARED}: {left:.2f} GB left"
    return ok(text) if left >= LEAST_SHARED else warning(text, "in a container: docker run --shm-size=1g")


def disk(settings: Settings) -> Finding:
    """Look whether results can be written."""
    place = Path(settings.results).expanduser().absolute()
    there = next(folder for folder in (place, *place.parents) if folder.exists())
    mend = "give local_results_path=… where there is room"
    if not (there.is_dir() and os.access(there, os.W_OK | os.X_OK)):
        return missing(f"{place} cannot be written", mend)
    left = shutil.disk_usage(there).free / GIGABYTE
    text = f"{place}: {left:.1f} GB left"
    return ok(text) if left >= LEAST_DISK else warning(text, mend)


def limits(settings: Settings) -> Finding:
    """Look at how many files and processes are allowed; a game takes some of both."""
    files, processes = (resource.getrlimit(kind)[0] for kind in (resource.RLIMIT_NOFILE, resource.RLIMIT_NPROC))
    infinite = resource.RLIM_INFINITY
    least = max(LEAST_FILES, 16 * settings.environments)
    shown = ["no limit" if limit == infinite else str(limit) for limit in (files, processes)]
    text = f"open files {shown[0]}, processes {shown[1]}"
    mends = [f"ulimit -n {4 * least}"] if files != infinite and files < least else []
    mends += ["ulimit -u 4096"] if processes != infinite and processes < LEAST_PROCESSES else []
    return warning(text, "; ".join(mends)) if mends else ok(text)


def ddp_port(settings: Settings) -> Finding:
    """Look whether ranks can meet at the configured port."""
    port = settings.ddp_port
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError:
            return warning(f"{port} is taken: a run on one machine takes another one", "give ddp_port=… of your choice")
    return ok(f"{port} is free")


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
