"""This machine: its limits, settings of its devices, and checks of the keys that depend on them."""

from __future__ import annotations

import ctypes
import os
import resource
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch

from omagd import runners
from omagd.config.env_info import EnvInfo
from omagd.config.schema import Config
from omagd.run.launchers import Plan, ranks_here
from omagd.run.memory_budget import GIGABYTE, available_bytes, data_key, replay_bytes
from omagd.utils.dist_utils import Dist
from omagd.utils.errors import UserError

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_LARGE = 1 << 30


def keep_freed_memory() -> bool:
    """Make glibc keep freed blocks below 1 GiB for reuse; return whether it did (False without glibc).

    By default tensors of some megabytes are mapped, zeroed and unmapped at every update, which takes a tenth of a QMIX
    update. From then on the process keeps its peak memory. Call it once, before the first update.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError, TypeError):
        return False
    return all([mallopt(_M_MMAP_THRESHOLD, _LARGE), mallopt(_M_TRIM_THRESHOLD, _LARGE)])


FAST_BF16 = frozenset({"avx512_bf16", "amx_bf16", "bf16"})
"""Processor flags of fast bf16 multiplication in Linux (the last one on Arm)."""


def check_machine(config: Config, plan: Plan, info: EnvInfo) -> None:
    """Reject values that this machine does not support. Errors: UserError."""
    for key, cuda in (("precision", plan.cuda), ("acting_precision", plan.cuda and not config.cpu_inference)):
        if getattr(config, key) == "bf16":
            check_bf16(key, cuda)
    if config.graph_updates:
        from omagd.resident.updates import why_packed

        if problem := why_packed(config):
            raise UserError(f"graph_updates=True: {problem}. Leave it out")
    _check_gpu_memory(config, plan, info)
    _check_limits(config, plan)


@contextmanager
def deterministic_algorithms(wanted: bool) -> Iterator[None]:
    """Use only deterministic algorithms of torch within a block, if `wanted`."""
    if not wanted:
        yield
        return
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when cuBLAS starts
    before = torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.benchmark
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0])
        torch.backends.cudnn.benchmark = before[1]


def limit_memory(device: torch.device, gigabytes: float | None) -> None:
    """Limit this process to `gigabytes` of its GPU (`max_memory_per_gpu_gb`); None or a CPU: no limit."""
    if gigabytes is not None and device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, gigabytes * GIGABYTE / total), device)


def processor_features(path: str = "/proc/cpuinfo") -> frozenset[str]:
    """Return the processor flags that Linux lists; empty elsewhere."""
    try:
        lines = Path(path).read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return frozenset()
    found = next((line for line in lines if line.lower().startswith(("flags", "features"))), "")
    return frozenset(found.partition(":")[2].split())


def check_bf16(key: str, cuda: bool) -> None:
    """Reject bf16 (requested by `key`) if it is not faster than float32 here. Errors: UserError."""
    if cuda:
        if not torch.cuda.is_bf16_supported(including_emulation=False):
            raise UserError(f"{key}=bf16: {torch.cuda.get_device_name()} has no bf16. Use {key}=float32")
    elif not (processor_features() & FAST_BF16 and torch.backends.mkldnn.is_available()):
        missing = "no avx512_bf16, no amx_bf16" if torch.backends.mkldnn.is_available() else "torch without oneDNN"
        raise UserError(f"{key}=bf16: is no faster on this processor ({missing}). Use {key}=float32")


def workers_of(config: Config) -> int:
    """Return the number of worker processes of each rank."""
    return int(runners.REGISTRY.get(config.runner).slots(config)) if config.env_processes else 0


def _check_limits(config: Config, plan: Plan) -> None:
    """Reject more open files and more processes than this user can have. Errors: UserError."""
    workers, ranks = workers_of(config), ranks_here(plan.world_size)
    keys = f"batch_size_run={config.batch_size_run}" if workers else f"world_size={plan.world_size}"
    what = f"{workers} environments in processes for each of {ranks} ranks" if workers else f"{plan.world_size} ranks"
    lower = f"Lower {keys.partition('=')[0]}, or raise the limit"
    if (files := files_needed(workers, plan.world_size)) > (most := most_files()):
        raise UserError(f"{keys}: {what} need {files} open files, a process may have {most} (ulimit -Hn). {lower}")
    left, why = processes_left()
    if (needed := processes_needed(workers, ranks, config.torch_threads)) > left:
        raise UserError(f"{keys}: {what} need {needed} processes and threads, {left} are left ({why}). {lower}")


def limit_warnings(config: Config, info: EnvInfo, folder: Path, on_gpus: bool, ranks: int) -> list[str]:
    """Return a line for each limit that a run may hit later.

    on_gpus: whether several ranks exchange through NCCL. ranks: that keep their episodes in this host's memory.
    """
    found = []
    free = available_bytes()
    if free is not None and (need := replay_bytes(config, info) * ranks) > free:
        key = data_key(config)
        what = f"{key}={getattr(config, key)}: the episodes of the ranks here may take {need / GIGABYTE:.1f} GB"
        found.append(f"{what}, and {free / GIGABYTE:.1f} GB of memory are free. Lower {key}")
    if on_gpus and SHARED.is_dir() and (left := shutil.disk_usage(SHARED).free) < LEAST_SHARED * GIGABYTE:
        found.append(f"{SHARED}: {left / GIGABYTE:.2f} GB left, NCCL may need more. In a container: --shm-size=1g")
    if config.enable_checkpointing:
        need, key = replay_bytes(config, info), data_key(config)
        what = f"{key}={getattr(config, key)}: a rank's part of a checkpoint may take {need / GIGABYTE:.1f} GB"
        if need > (size := largest_file()):
            found.append(f"{what}, a file at most {size / GIGABYTE:.1f} GB (ulimit -f). Lower {key}")
        if 2 * need > (left := shutil.disk_usage(folder).free):  # the earlier one is removed last
            found.append(f"{what}, twice while it is replaced; {folder} has {left / GIGABYTE:.1f} GB left. Lower {key}")
    return found


REPLAY_SHARE = 0.25
"""Part of a GPU's free memory that a full replay may take where `buffer_cpu_only` leaves that open."""


def ranks_per_gpu(world_size: int) -> int:
    """Return how many ranks share a GPU of this host."""
    return -(-ranks_here(world_size) // torch.cuda.device_count())


def room_for_episodes(config: Config, dist: Dist) -> float:
    """Return how many gigabytes of its GPU a rank may fill with episodes."""
    free = torch.cuda.mem_get_info(dist.device)[0] / ranks_per_gpu(dist.world_size) / GIGABYTE
    return REPLAY_SHARE * min(free, config.max_memory_per_gpu_gb or free)


def replay_device(config: Config, info: EnvInfo, dist: Dist) -> tuple[torch.device, str]:
    """Return where a rank keeps its replay; and why, in words, if it has a GPU."""
    memory = torch.device("cpu")
    if dist.device.type == "cpu" or data_key(config) == "batch_size":
        return memory, ""
    if (given := config.buffer_cpu_only) is not None:
        place = "in main memory, from which batches are copied" if given else "on the GPU"
        return memory if given else dist.device, f"replay {place}: buffer_cpu_only={given}"
    room, need = room_for_episodes(config, dist), replay_bytes(config, info) / GIGABYTE
    place, fits = ("on the GPU", "fit") if need <= room else ("in main memory", "do not fit")
    why = f"replay {place}: {need:.2f} GB when full {fits} into a quarter of its free memory, {room:.2f} GB"
    return dist.device if need <= room else memory, why


def _check_gpu_memory(config: Config, plan: Plan, info: EnvInfo) -> None:
    """Reject a memory limit above the GPU's memory, and a replay buffer that does not fit on the GPU."""
    cap = config.max_memory_per_gpu_gb
    if not plan.cuda:
        if cap is not None:
            raise UserError(f"max_memory_per_gpu_gb={cap:g}: this run uses the CPU. Leave it out")
        return
    cards = torch.cuda.device_count()
    sharing = ranks_per_gpu(plan.world_size)
    card = min(torch.cuda.get_device_properties(i).total_memory for i in range(cards)) / GIGABYTE / sharing
    if cap is not None and cap > card:
        shared = f", shared by {sharing} ranks" if sharing > 1 else ""
        raise UserError(f"max_memory_per_gpu_gb={cap:g}: a rank can have {card:.1f} GB of a GPU here{shared}")
    room = min(card, cap or card)
    need = replay_bytes(config, info) / GIGABYTE
    if data_key(config) == "batch_size" and need > room:
        raise UserError(
            f"batch_size={config.batch_size}: an on-policy batch may take {need:.1f} GB of a GPU, a rank can have"
            f" {room:.1f} GB. Lower it"
        )
    if config.buffer_cpu_only is False and need > room:
        fits = int(config.buffer_size * room / need)
        raise UserError(
            f"buffer_cpu_only=False: replay of buffer_size={config.buffer_size} episodes may take {need:.1f} GB of a"
            f" GPU, a rank can have {room:.1f} GB. Use buffer_cpu_only=True, or a buffer_size well below {fits}"
        )


CGROUPS = Path("/sys/fs/cgroup")
FILES, FILES_OF_WORKER, FILES_OF_RANK = 64, 4, 4
"""Open files of a process: its own, and those for each worker process and each other rank."""

USUAL_FILES = 1024
SHARED, LEAST_SHARED = Path("/dev/shm"), 0.25
"""Shared memory of the system, and the gigabytes that NCCL or a game may need there."""

THREADS, THREADS_OF_WORKER = 16, 2
"""Threads of a rank without `torch_threads`, and of a worker process."""


def files_needed(workers: int, ranks: int) -> int:
    """Return how many open files a rank with some worker processes may need. ranks: of all hosts."""
    return FILES + FILES_OF_WORKER * workers + FILES_OF_RANK * ranks


def processes_needed(workers: int, ranks: int, torch_threads: int) -> int:
    """Return how many processes and threads the ranks of a host need. workers: of each rank."""
    return ranks * (THREADS + torch_threads + THREADS_OF_WORKER * workers)


def raise_limit(files: int) -> None:
    """Raise the soft limit of open files of this process to so many, at most to the hard one."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    soft, hard = map(_number, limits)
    if soft < (wanted := min(max(files, USUAL_FILES), hard)):
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, limits[1]))


def most_files() -> int:
    """Return how many files a process may open once its soft limit is raised."""
    return _number(resource.getrlimit(resource.RLIMIT_NOFILE)[1])


def largest_file() -> int:
    """Return the bytes that a file may have."""
    return _number(resource.getrlimit(resource.RLIMIT_FSIZE)[0])


def processes_left(proc: Path = Path("/proc"), cgroups: Path = CGROUPS) -> tuple[int, str]:
    """Return how many processes and threads can still be started here, and what limits them ("" if nothing does)."""
    found = [(sys.maxsize, "")]
    most = _number(resource.getrlimit(resource.RLIMIT_NPROC)[0])
    if os.geteuid() != 0 and most < sys.maxsize:  # root is not limited
        found.append((most - _threads_of_user(proc), f"ulimit -u: {most}"))
    for folder in _own_cgroups(proc, cgroups):
        with suppress(OSError, ValueError):  # "max" is no number
            most = int((folder / "pids.max").read_text())
            found.append((most - int((folder / "pids.current").read_text()), f"pids.max of this control group: {most}"))
    left, why = min(found)
    return max(0, left), why


def _own_cgroups(proc: Path, root: Path) -> list[Path]:
    """Return the folders of the control groups of this process: its own, and those around it."""
    folders = [root, root / "pids"]
    with suppress(OSError):
        for line in (proc / "self" / "cgroup").read_text().splitlines():
            _, kinds, path = line.split(":", 2)
            base = root / "pids" if "pids" in kinds.split(",") else root
            own = base / path.lstrip("/")
            folders += [own, *(parent for parent in own.parents if base in parent.parents)]
    return list(dict.fromkeys(folders))


def _threads_of_user(proc: Path) -> int:
    """Return how many threads the processes of this user have; 0 where the system does not tell."""
    count = 0
    for process in proc.glob("[0-9]*"):
        with suppress(OSError):  # it has ended
            if process.stat().st_uid == os.getuid():
                count += len(os.listdir(process / "task"))
    return count


def _number(limit: int) -> int:
    return sys.maxsize if limit == resource.RLIM_INFINITY else limit
