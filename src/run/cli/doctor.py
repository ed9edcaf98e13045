"""`omagd doctor`: check this machine and print one line per check: status, finding and fix."""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import os
import re
import shutil
import socket
import sys
import tempfile
import tomllib
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from omagd.envs.sc2.install import INSTALL as INSTALL_GAME
from omagd.envs.sc2.install import build_of, builds, game_folder
from omagd.utils.errors import UserError

if TYPE_CHECKING:
    from omagd.config.schema import Config


INSTALL = "pip install -e . -c constraints.txt"


@dataclass(frozen=True)
class Settings:
    """The keys of the configuration that the checks read, and the game's version in `env_args`."""

    env: str = "skirmish"
    map_name: str = ""
    ddp_port: int = 12355
    local_results_path: str = "results"
    torch_threads: int = 1
    world_size: int | None = None
    batch_size_run: int = 8
    env_processes: bool = False
    game_version: str | None = None

    @classmethod
    def of(cls, config: Config) -> Settings:
        """Return the settings of a configuration."""
        version = config.env_args.get("game_version", None)
        keys = [field.name for field in fields(cls) if field.name != "game_version"]
        given = {key: getattr(config, key) for key in keys}
        return cls(**given, game_version=None if version is None else str(version))


@dataclass(frozen=True)
class Finding:
    """Result of a check: what was found, and a fix if one is needed."""

    mark: Literal["ok", "warning", "missing"]
    text: str
    fix: str = ""


@dataclass(frozen=True)
class Check:
    """One line of the doctor.

    Attributes:
        needed: environments that cannot be played without it; "all" means every one. fix: shown if the check itself
            fails.
    """

    name: str
    look: Callable[[Settings], Finding]
    needed: frozenset[str] = frozenset()
    fix: str = INSTALL


def ok(text: str) -> Finding:
    """Return a finding without a problem."""
    return Finding("ok", text)


def warning(text: str, fix: str) -> Finding:
    """Return a finding that limits runs."""
    return Finding("warning", text, fix)


def missing(text: str, fix: str) -> Finding:
    """Return a finding of something missing."""
    return Finding("missing", text, fix)


ROOT = Path(__file__).resolve().parents[3]
GAME = ("pysc2", "s2clientprotocol", "protobuf", "websocket-client", "absl-py")
ON_REQUEST = ("wandb", "tensorboard")
TESTED_PYTHON = (3, 11)
"""Python version of constraints.txt."""
GET_MAPS = f"{INSTALL_GAME} --maps-only"
GIGABYTE = 2.0**30
INSTALL_GPU = "pip install -e .[gpu] -c constraints.txt"
INSTALL_SMAX = "pip install -e .[smax] -c constraints.txt"
MORE_ROOM = "give local_results_path=… on a disk with enough space"
LEAST_DISK, LEAST_MEMORY = 2.0, 2.0


def python(_settings: Settings) -> Finding:
    """Check the Python version."""
    found, wanted = ".".join(map(str, sys.version_info[:3])), _requires_python()
    if fits(found, wanted):
        return ok(f"{found} in {sys.prefix}")
    return missing(f"{found}, but omagd needs {wanted}", "make a new environment: PYTHON=python3.12 ./quickstart.sh")


def packages(_settings: Settings) -> Finding:
    """Check the versions of the packages that every run needs."""
    wanted = [name for name in requirements() if name not in {*GAME, *ON_REQUEST}]
    if trouble := _trouble(*wanted):
        return missing(trouble, INSTALL)
    pinned, other = _pinned(), []
    for name in wanted:
        found = installed(name).partition("+")[0]
        if name in pinned and sys.version_info[:2] == TESTED_PYTHON and found != pinned[name]:
            other.append(f"{name} {found} ({pinned[name]})")
    text = f"{len(wanted)} packages as required"
    if other:
        return warning(f"{text}; not the versions that were tested together: {', '.join(other)}", INSTALL)
    return ok(text + (", in the versions that were tested together" if pinned else ""))


def messages(_settings: Settings) -> Finding:
    """Check that the game's messages load with the installed protobuf."""
    if trouble := _trouble(*(name for name in GAME if name != "pysc2")):
        return missing(trouble, INSTALL)
    protocol = importlib.import_module("omagd.envs.sc2.client")
    request = protocol.sc_pb.Request(ping=protocol.sc_pb.RequestPing())
    if protocol.sc_pb.Request.FromString(request.SerializeToString()) != request:
        return missing("a message changes when it is sent and received", INSTALL)
    kind = importlib.import_module("google.protobuf.internal.api_implementation").Type()
    text = f"protobuf {installed('protobuf')} ({kind}), s2clientprotocol {installed('s2clientprotocol')}: messages load"
    if kind == "python":
        return warning(f"{text}, slowly", "unset PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION")
    return ok(text)


def pysc2(_settings: Settings) -> Finding:
    """Check that the used parts of pysc2 can be imported."""
    if trouble := _trouble("pysc2"):
        return missing(trouble, INSTALL)
    importlib.import_module("omagd.envs.sc2.client")  # pysc2 takes the messages that it makes
    for name in ("pysc2.run_configs", "pysc2.lib.sc_process"):
        importlib.import_module(name)
    return ok(f"{installed('pysc2')}: run_configs and sc_process load")


def smax(_settings: Settings) -> Finding:
    """Check the packages of the extra `smax` without importing JAX."""
    wanted = ("jaxmarl", "jax", "jaxlib")
    if trouble := _trouble(*wanted, extra="smax"):
        return missing(trouble, INSTALL_SMAX)
    return ok(", ".join(f"{name} {installed(name)}" for name in wanted))


def wandb(_settings: Settings) -> Finding:
    """Check W&B and in which mode it would record."""
    if trouble := _trouble("wandb"):
        return missing(trouble, f"{INSTALL}, or leave use_wandb=False")
    from omagd.run.reporting.wandb_sink import choose_mode

    mode = choose_mode()
    kinds = {"online": "online, a key is stored", "offline": "offline, no key is stored (run `wandb login`)"}
    return ok(f"{installed('wandb')}, use_wandb=True records {kinds.get(mode, f'with WANDB_MODE={mode}')}")


def tensorboard(_settings: Settings) -> Finding:
    """Check that TensorBoard is installed."""
    if trouble := _trouble("tensorboard"):
        return missing(trouble, f"{INSTALL}, or leave use_tensorboard=False")
    return ok(installed("tensorboard"))


def torch(settings: Settings) -> Finding:
    """Check that torch computes correctly."""
    import torch as library

    if float((library.ones(2, 2) @ library.ones(2, 2)).sum()) != 8.0:
        return missing(f"{library.__version__} computes wrongly", "install another build of torch (pytorch.org)")
    one = "oneDNN" if library.backends.mkldnn.is_available() else "no oneDNN"
    text = f"{library.__version__} ({one}), torch_threads={settings.torch_threads} for each rank"
    ranks = settings.world_size or 1
    cores, threads = _cores(), settings.torch_threads * ranks
    if threads > cores:
        fix = f"lower torch_threads to {max(1, cores // ranks)}"
        return warning(f"{text}, {threads} in all on {cores} cores", fix)
    return ok(text)


def gpu(_settings: Settings) -> Finding:
    """List the GPUs with their free memory, the CUDA of driver and torch, and NCCL."""
    import torch

    if not torch.cuda.is_available():
        if shutil.which("nvidia-smi"):
            built = f"CUDA {torch.version.cuda}" if torch.version.cuda else "no CUDA"
            fix = "install a build that fits the driver: https://pytorch.org/get-started/locally"
            return warning(f"nvidia-smi is installed, but torch finds no GPU; it is built with {built}", fix)
        return ok("none: runs use the CPU")
    cards = range(torch.cuda.device_count())
    free = [torch.cuda.mem_get_info(card)[0] / GIGABYTE for card in cards]
    names = ", ".join(f"{torch.cuda.get_device_name(card)}, {free[card]:.1f} GB free" for card in cards)
    nccl = ".".join(map(str, torch.cuda.nccl.version()))
    text = f"{len(cards)} ({names}), driver {_driver()}, CUDA {torch.version.cuda}, NCCL {nccl}"
    if min(free) < LEAST_MEMORY:
        return warning(text, "end what else uses the GPU (nvidia-smi lists it), or lower buffer_size")
    return ok(text)


def _driver() -> str:
    """Return the version of NVIDIA's driver, by the newest CUDA that it knows, "unknown" where it cannot be asked."""
    found = ctypes.c_int()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(found))
    return f"for CUDA {found.value // 1000}.{found.value % 1000 // 10}" if found.value else "unknown"


def gpu_battles(_settings: Settings) -> Finding:
    """Check that battles can be played on a GPU: numba-cuda is there, and a kernel compiles and computes."""
    import torch

    if not torch.cuda.is_available():
        return ok("no GPU to play on")
    if trouble := _trouble("numba-cuda", extra="gpu"):
        return missing(f"{trouble}; runner=resident plays skirmish by it", INSTALL_GPU)
    importlib.import_module("omagd.envs.battle.compiled.cuda").try_out()
    return ok(f"numba-cuda {installed('numba-cuda')}: a kernel compiles and computes")


def memory(_settings: Settings) -> Finding:
    """Check the free main memory."""
    from omagd.run.memory_budget import available_bytes

    left = available_bytes()
    if left is None:
        return warning("unknown on this system", "watch memory/rss_mb in the log")
    text = f"{left / GIGABYTE:.1f} GB left"
    return ok(text) if left >= LEAST_MEMORY * GIGABYTE else warning(text, "lower buffer_size and batch_size_run")


def limits(settings: Settings) -> Finding:
    """Check the numbers of open files and processes, and the size of a file, against the needs of a run."""
    from omagd.run.training.device import files_needed, largest_file, most_files, processes_left, processes_needed

    workers, ranks = settings.batch_size_run if settings.env_processes else 0, settings.world_size or 1
    files, most = files_needed(workers, ranks), most_files()
    processes, (left, why) = processes_needed(workers, ranks, settings.torch_threads), processes_left()
    size = largest_file()
    room = f"{left} processes left ({why})" if why else "any number of processes"
    text = f"{most} open files ({files} needed), {room}"
    text += f" ({processes} needed), files of {'any size' if size == sys.maxsize else f'{size / GIGABYTE:.1f} GB'}"
    if files > most or processes > left:
        return missing(text, "raise the limit (ulimit -Hn, ulimit -u), or lower batch_size_run and world_size")
    return ok(text) if size >= LEAST_DISK * GIGABYTE else warning(text, "raise the limit: ulimit -f unlimited")


def shared_memory(_settings: Settings) -> Finding:
    """Check the shared memory of environments in processes."""
    from omagd.run.training.device import LEAST_SHARED, SHARED

    with tempfile.TemporaryFile(dir=SHARED) as file:
        file.write(b"omagd")
    room = os.statvfs(SHARED)
    left = room.f_bavail * room.f_frsize / GIGABYTE
    text = f"{SHARED}: {left:.2f} GB left"
    return ok(text) if left >= LEAST_SHARED else warning(text, "in a container: docker run --shm-size=1g")


def disk(settings: Settings) -> Finding:
    """Check that results can be written."""
    place = Path(settings.local_results_path).expanduser().absolute()
    there = next(folder for folder in (place, *place.parents) if folder.exists())
    if not (there.is_dir() and os.access(there, os.W_OK | os.X_OK)):
        return missing(f"{place} cannot be written", MORE_ROOM)
    left = shutil.disk_usage(there).free / GIGABYTE
    text = f"{place}: {left:.1f} GB left"
    return ok(text) if left >= LEAST_DISK else warning(text, MORE_ROOM)


def ddp_port(settings: Settings) -> Finding:
    """Check that `ddp_port` is free."""
    port = settings.ddp_port
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError:
            text = f"{port} is taken: a run on one machine uses another one, one on several machines needs it"
            return warning(text, f"give another one, such as ddp_port={port - 1 if port == 65535 else port + 1}")
    return ok(f"{port} is free")


def game(settings: Settings) -> Finding:
    """Find the installed versions of the game."""
    from omagd.run.reporting.card import game_name

    where, source = game_folder(), "SC2PATH" if os.environ.get("SC2PATH") else "SC2PATH is not set"
    found = builds()
    if not found:
        what = "no Versions/Base*/SC2_x64" if where.is_dir() else "no such folder"
        return missing(f"{where} ({source}): {what}", f"{INSTALL_GAME} installs the game; SC2PATH is its folder")
    stuck = [build for build in found if not os.access(where / f"Versions/Base{build:05d}/SC2_x64", os.X_OK)]
    if stuck:
        return missing(f"{where} ({source}): Base{stuck[0]} is not executable", f"chmod +x {where}/Versions/*/SC2_x64")
    chosen = game_name(build_of(settings.game_version))
    others = [game_name(build).removeprefix("StarCraft II ") for build in found if game_name(build) != chosen]
    return ok(f"{where} ({source}): {chosen} is used" + (f"; also installed: {', '.join(others)}" if others else ""))


def smac_maps(settings: Settings) -> Finding:
    """Find the files of SMAC's maps."""
    from omagd.envs.battle.maps import MAPS, is_custom

    chosen = settings.map_name if settings.env == "sc2" else ""
    names = [spec.game_file for spec in MAPS.values()]
    return _maps([*names, chosen] if chosen and is_custom(chosen) else names, chosen)


def smacv2_maps(_settings: Settings) -> Finding:
    """Find the map of SMACv2."""
    from omagd.envs.battle.args import FIELD

    return _maps([FIELD], FIELD)


def installed(name: str) -> str:
    """Return the installed version of a package, empty where there is none."""
    try:
        return metadata.version(name) or ""
    except metadata.PackageNotFoundError:
        return ""


def requirements(extra: str = "") -> dict[str, str]:
    """Return the version requirements by package ("torch": ">=2.10"), or those that an extra adds."""
    project = _project()
    if project:
        lines = project["optional-dependencies"][extra] if extra else project["dependencies"]
    else:
        mark = re.compile(rf"extra == ['\"]{extra}['\"]" if extra else r"^(?!.*extra ==)")
        lines = [line for line in metadata.requires("omagd") or [] if mark.search(line)]
    found = (re.match(r"([\w.-]+)(?:\[[^]]*\])?\s*\(?([^;)]*)", line) for line in lines)
    return {match[1]: match[2].strip() for match in found if match}


def fits(version: str, spec: str) -> bool:
    """Return whether a version matches a requirement such as ">=2.10,<3"."""
    from packaging.specifiers import SpecifierSet

    return SpecifierSet(spec).contains(version, prereleases=True)


def _project() -> dict[str, Any]:
    """Return [project] of pyproject.toml if omagd runs from its repository, else nothing."""
    path = ROOT / "pyproject.toml"
    project = tomllib.loads(path.read_text(encoding="utf-8")).get("project", {}) if path.is_file() else {}
    return project if project.get("name") == "omagd" else {}


def _requires_python() -> str:
    return str(_project().get("requires-python") or metadata.metadata("omagd")["Requires-Python"])


def _pinned() -> dict[str, str]:
    path = ROOT / "constraints.txt"
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    return dict(line.split("==", 1) for line in lines if "==" in line and not line.startswith("#"))


def _trouble(*names: str, extra: str = "") -> str:
    """Return a line about packages that are missing or do not fit `requirements(extra)`; empty if there are none."""
    lacking = [name for name in names if not installed(name)]
    if lacking:
        return f"not installed: {', '.join(lacking)}"
    known = requirements(extra)
    specs = [(name, installed(name), known.get(name)) for name in names]
    wrong = [f"{name} {found} (needs {spec})" for name, found, spec in specs if spec and not fits(found, spec)]
    return f"do not fit: {', '.join(wrong)}" if wrong else ""


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _maps(names: list[str], chosen: str) -> Finding:
    from omagd.envs.sc2.install import map_path

    folder = game_folder() / "Maps"
    lacking = [name for name in names if not (folder / map_path(name)).is_file()]
    text = f"{len(names) - len(lacking)} of {len(names)} in {(folder / map_path('x')).parent}"
    if not lacking:
        return ok(text)
    more = f" and {len(lacking) - 6} more" if len(lacking) > 6 else ""
    text = f"{text}, not there: {', '.join(lacking[:6])}{more}"
    return missing(text, GET_MAPS) if chosen in lacking or len(lacking) == len(names) else warning(text, GET_MAPS)


ALL = frozenset({"all"})
GAMES = frozenset({"sc2", "sc2_v2"})
SHOWN = ("skirmish", "smax", "sc2", "sc2_v2")
"""Environments that the last line reports."""

CHECKS = (
    Check("python", python, ALL),
    Check("packages", packages, ALL),
    Check("torch", torch, ALL),
    Check("gpu", gpu, fix="see the line on torch"),
    Check("gpu battles", gpu_battles, fix=INSTALL_GPU),
    Check("memory", memory, fix="see the line on torch"),
    Check("limits", limits, fix="see the line on torch"),
    Check("shared memory", shared_memory, GAMES, fix="mount a writable tmpfs at /dev/shm"),
    Check("disk", disk, ALL, fix=MORE_ROOM),
    Check("ddp port", ddp_port, fix="give another ddp_port, such as ddp_port=12400"),
    Check("smax", smax, frozenset({"smax"}), fix=INSTALL_SMAX),
    Check("game messages", messages, GAMES),
    Check("pysc2", pysc2, GAMES),
    Check("game", game, GAMES, fix="./install_sc2.sh"),
    Check("SMAC maps", smac_maps, frozenset({"sc2"}), fix=GET_MAPS),
    Check("SMACv2 map", smacv2_maps, frozenset({"sc2_v2"}), fix=GET_MAPS),
    Check("W&B", wandb, fix="leave use_wandb=False"),
    Check("TensorBoard", tensorboard, fix="leave use_tensorboard=False"),
)


def examine(settings: Settings, checks: Iterable[Check] = CHECKS) -> list[tuple[Check, Finding]]:
    """Run the checks and return their findings; the finding of a check that fails is its error."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return [(check, _look(check, settings)) for check in checks]


def render(found: Sequence[tuple[Check, Finding]], env: str) -> tuple[str, bool]:
    """Return a line per check and one about the environments, and whether `env` can be played."""
    lines = []
    for check, finding in found:
        fix = f" → {finding.fix}" if finding.fix else ""
        lines.append(f"{finding.mark:<9}{check.name:<15}{' '.join(finding.text.split())}{fix}")
    environments = []
    for name in dict.fromkeys((env, *SHOWN)):
        lacking = _missing(found, name)
        environments.append(f"{name} {'cannot be played (' + ', '.join(lacking) + ')' if lacking else 'can be played'}")
    return "\n".join([*lines, "; ".join(environments)]) + "\n", not _missing(found, env)


def _missing(found: Sequence[tuple[Check, Finding]], env: str) -> list[str]:
    """Return the names of missing things that an environment needs."""
    return [check.name for check, finding in found if finding.mark == "missing" and check.needed & {"all", env}]


def _look(check: Check, settings: Settings) -> Finding:
    try:
        return check.look(settings)
    except UserError as error:  # its message includes a fix
        return Finding("missing", error.message)
    except (Exception, SystemExit) as error:  # noqa: BLE001 (the doctor reports whatever is broken)
        reason = (str(error).strip().splitlines() or [""])[0][:200]
        return Finding("missing", f"{type(error).__name__}: {reason}", check.fix)
