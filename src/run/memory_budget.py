"""Memory: size of a replay, free memory of the machine, and out-of-memory errors that name the key to reduce."""

from __future__ import annotations

import errno
import re
import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from operator import itemgetter
from pathlib import Path

import torch

from omagd import controllers, runners
from omagd.components.episode_codec import Codec, Spec
from omagd.config.env_info import EnvInfo
from omagd.config.schema import COMPONENT_ARGS, Config
from omagd.learners.protocol import learner_class, records_full_obs
from omagd.runners.rollout import row_fields
from omagd.utils.errors import UserError


def resident_bytes() -> int:
    """Return the resident bytes of this process; where they are unknown, their peak."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return pages * resource.getpagesize()
    except (OSError, IndexError, ValueError):
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024


GIGABYTE = 2.0**30
NETWORK_KEYS = ("rnn_hidden_dim", "mixing_embed_dim", "hypernet_embed", "gnn_hidden_dim")
_UNITS = {"": 1.0, "K": 2.0**10, "M": 2.0**20, "G": 2.0**30, "T": 2.0**40}
_RAN_OUT = re.compile(
    r"can't allocate memory|out of memory|bad_alloc|bad allocation|RESOURCE_EXHAUSTED|ALLOC_FAILED"
    r"|Cannot allocate memory|could not create a memory",
    re.IGNORECASE,
)
_ASKED = re.compile(r"(?:allocate|allocating) (\d+(?:\.\d+)?) ?([KMGT]?)i?B?(?:ytes)?\b", re.IGNORECASE)


@contextmanager
def oom_hint(config: Config, stage: str, phase: str, device: torch.device | None = None) -> Iterator[None]:
    """Turn out-of-memory errors in a block into a UserError that names the key to reduce.

    Args:
        stage: stage1, stage2 or stage3. phase: of the loop (collect, update, test, ...), "replay" for keeping
            episodes, "start" for making the environment, "networks" for making the networks. device: of the rank.
    Errors: UserError; any other error passes.
    """
    try:
        yield
    except (MemoryError, RuntimeError, OSError) as error:
        asked = asked_bytes(error)
        if asked is None:
            raise
        figures = _figures(config, error, asked, device)
        raise UserError(f"out of memory in {stage} ({phase}): {figures}. {_fix(config, stage, phase)}") from error


def asked_bytes(error: BaseException) -> float | None:
    """Return the requested bytes of an out-of-memory error: 0 if unknown, None for another error."""
    ran_out = isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM)
    if not ran_out and not (isinstance(error, RuntimeError) and _RAN_OUT.search(str(error))):
        return None
    found = _ASKED.search(str(error))
    return float(found[1]) * _UNITS[found[2].upper()] if found else 0.0


def _figures(config: Config, error: BaseException, asked: float, device: torch.device | None) -> str:
    wanted = f"{_gb(asked)} more were requested" if asked else "more was requested"
    if isinstance(error, torch.cuda.OutOfMemoryError) and device is not None and device.type == "cuda":
        held, cap = torch.cuda.memory_reserved(device), config.max_memory_per_gpu_gb
        total = _gb(torch.cuda.get_device_properties(device).total_memory)
        room = f"max_memory_per_gpu_gb={cap:g}" if cap is not None else f"a GPU of {total}"
        return f"{wanted}, this rank holds {_gb(held)} of {room}"
    return f"{wanted}, this process holds {_gb(resident_bytes())}"


def _fix(config: Config, stage: str, phase: str) -> str:
    """Return which key reduces the memory of a phase, with its value and one to try."""

    def given(key: str) -> str:
        return f"{key}={getattr(config, key)}"

    learns = phase in {"update", "prepare"}
    data = given(data_key(config) if stage == "stage3" else "graph_pretrain_episodes")
    if phase == "networks":
        return f"Lower one of {', '.join(_widths(config))}"
    if phase == "start":
        return f"Lower {given('batch_size_run')}"
    if phase == "replay":
        return f"Lower {data}"
    if stage == "stage3" and learns:
        more = min(2 * config.accumulate, config.batch_size)
        return f"{f'Give accumulate={more}, or lower' if more > config.accumulate else 'Lower'} {given('batch_size')}"
    if stage != "stage3" and (learns or phase in {"test", "finish"}):
        half = max(1, config.graph_frames_at_once // 2)
        other = "graph_pretrain_batch_size" if learns else "graph_pretrain_eval_episodes"
        return f"Give graph_frames_at_once={half}, or lower {given(other)}"
    return f"Lower {given('batch_size_run')} or {data}"


def _widths(config: Config) -> list[str]:
    """Return the keys that set widths of networks, with their values, the largest first."""
    found = {key: getattr(config, key) for key in NETWORK_KEYS}
    for section in COMPONENT_ARGS:
        for key, value in getattr(config, section).items():
            if re.search("dim|hidden|embed|width", key) and isinstance(value, int):
                found[f"{section}.{key}"] = value
    return [f"{key}={value}" for key, value in sorted(found.items(), key=itemgetter(1), reverse=True)]


def data_key(config: Config) -> str:
    """Return the key that bounds the number of episodes that stage 3 stores."""
    return "buffer_size" if learner_class(config.learner).data == "replay" else "batch_size"


def replay_bytes(config: Config, info: EnvInfo) -> int:
    """Return the bytes of a full replay buffer of stage 3, or of an on-policy batch, with episodes of full length.

    0 for a run without stage 3.
    """
    if config.evaluate or config.pretrain_only or config.stage not in {"stage3", "all"}:
        return 0
    runner = runners.REGISTRY.get(config.runner)
    entries = getattr(config, key := data_key(config))
    if key == "batch_size":  # collected in whole rounds; a stream may bring more, and those that a test had finished
        slots = int(runner.slots(config))
        entries = max(entries, slots) + 2 * slots
    return Codec(replay_spec(config, info)).width * int(runner.rows(info)) * entries


def replay_spec(config: Config, info: EnvInfo) -> Spec:
    """Return the fields of the episodes that stage 3 stores."""
    fields = row_fields(info, records_full_obs(config))
    return {**fields, **controllers.REGISTRY.get(config.mac).extra_fields(config, info)}


def available_bytes() -> float | None:
    """Return the bytes that this process and its children may still allocate; None if unknown."""
    bounds = []
    with suppress(OSError):
        found = re.findall(r"^MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text(), re.MULTILINE)
        bounds += [1024 * int(free) for free in found]
    with suppress(OSError, ValueError):  # ValueError: "max", a container without a limit (cgroup v2)
        limit, used = (int(Path("/sys/fs/cgroup", name).read_text()) for name in ("memory.max", "memory.current"))
        bounds.append(max(limit - used, 0))
    return min(bounds, default=None)


def _gb(count: float) -> str:
    return f"{count / GIGABYTE:.1f} GB" if count >= 0.1 * GIGABYTE else f"{count / 2.0**20:.0f} MB"
