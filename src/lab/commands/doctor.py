"""`omagd doctor`: check this machine and print one line per check: status, finding and fix."""

from __future__ import annotations

import argparse
import importlib
import os
import shutil
import sys
import tempfile
import tomllib
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omagd.envs.sc2.install import INSTALL as INSTALL_GAME
from omagd.envs.sc2.install import build_of, builds, game_folder
from omagd.utils.errors import USER_ERROR_EXIT_CODE, UserError, install, print_out

if TYPE_CHECKING:
    from omagd.config.schema import Config

INSTALL = "pip install -e . -c constraints.txt"
GAME = ("pysc2", "s2clientprotocol", "protobuf", "websocket-client", "absl-py")
GET_MAPS = f"{INSTALL_GAME} --maps-only"
GIGABYTE = 2.0**30
WORLDS = {
    "lbf": ("lbf", "lbforaging"), "mpe": ("mpe", "mpe2"), "rware": ("rware", "rware"),
    "gymma": ("gymnasium", "gymnasium"), "pettingzoo": ("pettingzoo", "pettingzoo"),
    "jaxmarl": ("jaxmarl", "jax", "jaxlib", "jaxmarl"), "smax": ("smax", "jax", "jaxlib", "jaxmarl"),
}  # fmt: skip
"""The extra of an environment, and its packages."""
EXTRAS = ("full", "gpu", *(extra for extra, *_ in WORLDS.values()))
MORE_ROOM = "give local_results_path=… on a disk with enough space"
LEAST_DISK, LEAST_MEMORY = 2.0, 2.0


class Problem(Exception):
    """What a check has found: a text and its fix."""

    mark = "missing"


class Limited(Problem):
    """What works, with a limitation."""

    mark = "warning"


@dataclass(frozen=True)
class Check:
    """One line of the doctor.

    Attributes:
        look: returns what is there. Errors: Problem. needed: environments that cannot be played without it; "all" means
            every one. fix: shown if the check itself fails.
    """

    name: str
    look: Callable[[Any], str]
    needed: frozenset[str] = frozenset()
    fix: str = INSTALL


Found = list[tuple[Check, str, str]]
"""Checks, each with its mark (ok, warning or missing) and its text."""


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `doctor`."""
    parser.add_argument("--config", help="as in a training")
    parser.add_argument("--env-config", "--env_config", help="environment to check the machine for (default: skirmish)")
    parser.add_argument("words", nargs="*", metavar="with key=value", help="values to check, such as world_size=4")


def main(options: argparse.Namespace) -> int:
    """Print the findings; return 0 if the environment can be played here."""
    given = {"config": options.config, "env-config": options.env_config}
    config: Config | None = None
    checks: Sequence[Check] = CHECKS
    try:
        from omagd.run.cli.main import config_from

        config = config_from([*(f"--{name}={value}" for name, value in given.items() if value), *options.words])
        env = config.env
    except ImportError as error:  # a package that reads configurations is missing or broken
        text = f"cannot be read: {error}"

        def look(_config: Config | None) -> str:
            raise Problem(text, INSTALL)

        checks = [*CHECKS[:2], Check("configuration", look, ALL)]
        env = str(options.env_config or "skirmish")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = [(check, *_look(check, config)) for check in checks]
    text, ready = render(found, env)
    print_out(text)
    return 0 if ready else USER_ERROR_EXIT_CODE


def _look(check: Check, config: Config | None) -> tuple[str, str]:
    """Return the mark and the text of a check; one that fails is a problem, too."""
    try:
        return "ok", check.look(config)
    except Problem as problem:
        return problem.mark, " → ".join(problem.args)
    except UserError as error:  # its message includes a fix
        return "missing", error.message
    except (Exception, SystemExit) as error:  # noqa: BLE001 (the doctor reports whatever is broken)
        reason = (str(error).strip().splitlines() or [""])[0][:200]
        return "missing", f"{type(error).__name__}: {reason} → {check.fix}"


def render(found: Found, env: str) -> tuple[str, bool]:
    """Return a line per check and one about the environments, and whether `env` can be played."""

    def missing(name: str) -> list[str]:
        return [check.name for check, mark, _ in found if mark == "missing" and check.needed & {"all", name}]

    lines = [f"{mark:<9}{check.name:<15}{' '.join(text.split())}" for check, mark, text in found]
    names = dict.fromkeys((env, "skirmish", "smax", "sc2", "sc2_v2"))
    lacking = {name: ", ".join(missing(name)) for name in names}
    ends = [f"{name} {f'cannot be played ({lacks})' if lacks else 'can be played'}" for name, lacks in lacking.items()]
    return "\n".join([*lines, "; ".join(ends)]) + "\n", not lacking[env]


def installed(name: str) -> str:
    """Return the installed version of a package, empty where there is none."""
    try:
        return metadata.version(name) or ""
    except metadata.PackageNotFoundError:
        return ""


def project() -> dict[str, Any]:
    """Return `[project]` of the repository that omagd runs from, else the same of the installed package."""
    path = Path(__file__).resolve().parents[3] / "pyproject.toml"
    found = tomllib.loads(path.read_text(encoding="utf-8")).get("project", {}) if path.is_file() else {}
    if found.get("name") == "omagd":
        return dict(found)
    about = metadata.metadata("omagd")
    lines = [line.partition(";") for line in metadata.requires("omagd") or []]
    extras = {extra: [line for line, _, mark in lines if f'"{extra}"' in mark] for extra in EXTRAS}
    return {
        "requires-python": about["Requires-Python"], "optional-dependencies": extras,
        "dependencies": [line for line, _, mark in lines if not mark],
    }  # fmt: skip


def requirements(extra: str = "") -> dict[str, Any]:
    """Return the version requirements by package, or those that an extra adds."""
    from packaging.requirements import Requirement

    lines = project()["optional-dependencies"][extra] if extra else project()["dependencies"]
    return {made.name: made.specifier for made in map(Requirement, lines)}


def require(names: Sequence[str], extra: str = "") -> str:
    """Return packages, of an extra, with their versions. Errors: Problem where some are missing or do not fit."""
    fix = install(extra) if extra else INSTALL
    have = {name: installed(name) for name in names}
    if lacking := [name for name in names if not have[name]]:
        raise Problem(f"not installed: {', '.join(lacking)}", fix)
    known = requirements(extra)
    wrong = [name for name in names if name in known and not known[name].contains(have[name], prereleases=True)]
    if wrong:
        raise Problem(f"do not fit: {', '.join(f'{name} {have[name]} (needs {known[name]})' for name in wrong)}", fix)
    return ", ".join(f"{name} {have[name]}" for name in names)


def python(_config: Config | None) -> str:
    """Check the Python version."""
    from packaging.specifiers import SpecifierSet

    found, wanted = ".".join(map(str, sys.version_info[:3])), project()["requires-python"]
    if not SpecifierSet(wanted).contains(found, prereleases=True):
        fix = "make a new environment: PYTHON=python3.12 ./quickstart.sh"
        raise Problem(f"{found}, but omagd needs {wanted}", fix)
    return f"{found} in {sys.prefix}"


def packages(_config: Config | None) -> str:
    """Check the versions of the packages that every run needs."""
    wanted = list(requirements())
    require(wanted)
    return f"{len(wanted)} packages as required"


def torch(config: Config) -> str:
    """Check that torch computes correctly."""
    import torch as library

    from omagd.lab.studies.local import usable_cores

    if float((library.ones(2, 2) @ library.ones(2, 2)).sum()) != 8.0:
        raise Problem(f"{library.__version__} computes wrongly", "install another build of torch (pytorch.org)")
    text = f"{library.__version__}, torch_threads={config.torch_threads} for each rank"
    ranks = config.world_size or 1
    cores, threads = usable_cores(), config.torch_threads * ranks
    if threads > cores:
        fix = f"lower torch_threads to {max(1, cores // ranks)}"
        raise Limited(f"{text}, {threads} in all on {cores} cores", fix)
    return text


def gpu(_config: Config) -> str:
    """List the GPUs with their free memory, torch's CUDA, and NCCL."""
    import torch

    if not torch.cuda.is_available():
        if shutil.which("nvidia-smi"):
            built = f"CUDA {torch.version.cuda}" if torch.version.cuda else "no CUDA"
            fix = "install a build that fits the driver: https://pytorch.org/get-started/locally"
            raise Limited(f"nvidia-smi is installed, but torch finds no GPU; it is built with {built}", fix)
        return "none: runs use the CPU"
    cards = range(torch.cuda.device_count())
    free = [torch.cuda.mem_get_info(card)[0] / GIGABYTE for card in cards]
    names = ", ".join(f"{torch.cuda.get_device_name(card)}, {free[card]:.1f} GB free" for card in cards)
    nccl = ".".join(map(str, torch.cuda.nccl.version()))
    text = f"{len(cards)} ({names}), CUDA {torch.version.cuda}, NCCL {nccl}"
    if min(free) < LEAST_MEMORY:
        raise Limited(text, "end what else uses the GPU (nvidia-smi lists it), or lower buffer_size")
    return text


def gpu_battles(_config: Config) -> str:
    """Check that battles can be played on a GPU: numba-cuda is there, and a kernel compiles and computes."""
    import torch

    if not torch.cuda.is_available():
        return "no GPU to play on"
    found = require(["numba-cuda"], "gpu")
    importlib.import_module("omagd.envs.battle.compiled.cuda").try_out()
    return f"{found}: a kernel compiles and computes"


def memory(_config: Config) -> str:
    """Check the free main memory."""
    from omagd.run.memory_budget import available_bytes

    left = available_bytes()
    if left is None:
        raise Limited("unknown on this system", "watch memory/rss_mb in the log")
    return _room(f"{left / GIGABYTE:.1f} GB left", left, LEAST_MEMORY, "lower buffer_size and batch_size_run")


def _room(text: str, left: float, least: float, fix: str) -> str:
    """Return the text. left: bytes. Errors: Limited where these are less than so many gigabytes."""
    if left < least * GIGABYTE:
        raise Limited(text, fix)
    return text


def limits(config: Config) -> str:
    """Check the numbers of open files and processes, and the size of a file, against the needs of a run."""
    from omagd.run.launchers import ranks_here
    from omagd.run.training import device

    workers, ranks = device.workers_of(config), config.world_size or 1
    files, most = device.files_needed(workers, ranks), device.most_files()
    processes = device.processes_needed(workers, ranks_here(ranks), config.torch_threads)
    (left, why), size = device.processes_left(), device.largest_file()
    room = f"{left} processes left ({why})" if why else "any number of processes"
    text = f"{most} open files ({files} needed), {room}"
    text += f" ({processes} needed), files of {'any size' if size == sys.maxsize else f'{size / GIGABYTE:.1f} GB'}"
    if files > most or processes > left:
        raise Problem(text, "raise the limit (ulimit -Hn, ulimit -u), or lower batch_size_run and world_size")
    return _room(text, size, LEAST_DISK, "raise the limit: ulimit -f unlimited")


def shared_memory(_config: Config) -> str:
    """Check the shared memory of environments in processes."""
    from omagd.run.training.device import LEAST_SHARED, SHARED

    with tempfile.TemporaryFile(dir=SHARED) as file:
        file.write(b"omagd")
    room = os.statvfs(SHARED)
    left = room.f_bavail * room.f_frsize
    text = f"{SHARED}: {left / GIGABYTE:.2f} GB left"
    return _room(text, left, LEAST_SHARED, "in a container: docker run --shm-size=1g")


def disk(config: Config) -> str:
    """Check that results can be written."""
    place = Path(config.local_results_path).expanduser().absolute()
    there = next(folder for folder in (place, *place.parents) if folder.exists())
    if not (there.is_dir() and os.access(there, os.W_OK | os.X_OK)):
        raise Problem(f"{place} cannot be written", MORE_ROOM)
    left = shutil.disk_usage(there).free
    return _room(f"{place}: {left / GIGABYTE:.1f} GB left", left, LEAST_DISK, MORE_ROOM)


def of_extra(extra: str, *names: str) -> Callable[[Config], str]:
    """Return what checks packages of an extra, without importing them."""
    return lambda _config: require(names, extra)


def pysc2(_config: Config) -> str:
    """Check that the used parts of pysc2 can be imported, and that the game's messages load with this protobuf."""
    text = require(GAME, "full")
    protocol = importlib.import_module("omagd.envs.sc2.client")
    request = protocol.sc_pb.Request(ping=protocol.sc_pb.RequestPing())
    if protocol.sc_pb.Request.FromString(request.SerializeToString()) != request:
        raise Problem("a message changes when it is sent and received", install("full"))
    for name in ("pysc2.run_configs", "pysc2.lib.sc_process"):
        importlib.import_module(name)
    return text


def game(config: Config) -> str:
    """Find the installed versions of the game."""
    from omagd.run.reporting.card import game_name

    where, source = game_folder(), "SC2PATH" if os.environ.get("SC2PATH") else "SC2PATH is not set"
    found = builds()
    if not found:
        what = "no Versions/Base*/SC2_x64" if where.is_dir() else "no such folder"
        raise Problem(f"{where} ({source}): {what}", f"{INSTALL_GAME} installs the game; SC2PATH is its folder")
    stuck = [build for build in found if not os.access(where / f"Versions/Base{build:05d}/SC2_x64", os.X_OK)]
    if stuck:
        raise Problem(f"{where} ({source}): Base{stuck[0]} is not executable", f"chmod +x {where}/Versions/*/SC2_x64")
    version = config.env_args.get("game_version", None)
    chosen = game_name(build_of(None if version is None else str(version)))
    others = [game_name(build).removeprefix("StarCraft II ") for build in found if game_name(build) != chosen]
    return f"{where} ({source}): {chosen} is used" + (f"; also installed: {', '.join(others)}" if others else "")


def smac_maps(config: Config) -> str:
    """Find the files of SMAC's maps."""
    from omagd.envs.battle.maps import MAPS, is_custom

    chosen = config.map_name if config.env == "sc2" else ""
    names = [spec.game_file for spec in MAPS.values()]
    return _maps([*names, chosen] if chosen and is_custom(chosen) else names, chosen)


def smacv2_maps(_config: Config) -> str:
    """Find the map of SMACv2."""
    from omagd.envs.battle.args import FIELD

    return _maps([FIELD], FIELD)


def _maps(names: list[str], chosen: str) -> str:
    from omagd.envs.sc2.install import map_path

    folder = game_folder() / "Maps"
    lacking = [name for name in names if not (folder / map_path(name)).is_file()]
    text = f"{len(names) - len(lacking)} of {len(names)} in {(folder / map_path('x')).parent}"
    if lacking:
        text += f", not there: {', '.join(lacking)}" * (len(lacking) < max(2, len(names)))
        raise (Problem if chosen in lacking or len(lacking) == len(names) else Limited)(text, GET_MAPS)
    return text


def wandb(_config: Config) -> str:
    """Check W&B and in which mode it would record."""
    found = require(["wandb"], "full")
    from omagd.run.reporting.wandb_sink import choose_mode

    kinds = {"online": "online, a key is stored", "offline": "offline, no key is stored (run `wandb login`)"}
    return f"{found}, use_wandb=True records {kinds.get(mode := choose_mode(), f'with WANDB_MODE={mode}')}"


ALL = frozenset({"all"})
GAMES = frozenset({"sc2", "sc2_v2"})
CHECKS = (
    Check("python", python, ALL),
    Check("packages", packages, ALL),
    Check("torch", torch, ALL),
    Check("gpu", gpu, fix="see the line on torch"),
    Check("gpu battles", gpu_battles),
    Check("memory", memory, fix="see the line on torch"),
    Check("limits", limits, ALL, fix="see the line on torch"),
    Check("shared memory", shared_memory, GAMES, fix="mount a writable tmpfs at /dev/shm"),
    Check("disk", disk, ALL, fix=MORE_ROOM),
    *(Check(name, of_extra(*found), frozenset({name}), fix=install(found[0])) for name, found in WORLDS.items()),
    Check("pysc2", pysc2, GAMES, fix=install("full")),
    Check("game", game, GAMES, fix="./install_sc2.sh"),
    Check("SMAC maps", smac_maps, frozenset({"sc2"}), fix=GET_MAPS),
    Check("SMACv2 map", smacv2_maps, frozenset({"sc2_v2"}), fix=GET_MAPS),
    Check("W&B", wandb, fix="leave use_wandb=False"),
    Check("TensorBoard", of_extra("full", "tensorboard"), fix="leave use_tensorboard=False"),
)
