"""Python and the packages: what is installed, and whether it fits what pyproject.toml and constraints.txt say."""

from __future__ import annotations

import importlib
import re
import sys
import tomllib
from importlib import metadata
from pathlib import Path
from typing import Any

import omagd
from omagd.run.cli.doctor.findings import INSTALL, Finding, Settings, missing, ok, warning

ROOT = Path(omagd.__file__).resolve().parent.parent
GAME = ("pysc2", "s2clientprotocol", "protobuf", "websocket-client", "absl-py")
ON_REQUEST = ("wandb", "tensorboard")
TESTED_PYTHON = (3, 11)
"""The Python that constraints.txt was made with."""


def python(_settings: Settings) -> Finding:
    """Look at the interpreter."""
    found, wanted = ".".join(map(str, sys.version_info[:3])), _requires_python()
    if fits(found, wanted):
        return ok(f"{found} in {sys.prefix}")
    return missing(f"{found}, but omagd needs {wanted}", "make the environment anew: PYTHON=python3.12 ./quickstart.sh")


def packages(_settings: Settings) -> Finding:
    """Look at the versions of what every run needs."""
    wanted = {name: spec for name, spec in requirements().items() if name not in {*GAME, *ON_REQUEST}}
    if trouble := _trouble(wanted):
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
    """Look whether the game's messages load under the installed protobuf."""
    wanted = requirements()
    if trouble := _trouble({name: wanted.get(name, "") for name in GAME if name != "pysc2"}):
        return missing(trouble, INSTALL)
    protocol = importlib.import_module("omagd.envs.sc2.client")
    request = protocol.sc_pb.Request(ping=protocol.sc_pb.RequestPing())
    if protocol.sc_pb.Request.FromString(request.SerializeToString()) != request:
        return missing("a message does not come back as it was sent", INSTALL)
    kind = importlib.import_module("google.protobuf.internal.api_implementation").Type()
    text = f"protobuf {installed('protobuf')} ({kind}), s2clientprotocol {installed('s2clientprotocol')}: messages load"
    if kind == "python":
        return warning(f"{text}, slowly", "unset PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION")
    return ok(text)


def pysc2(_settings: Settings) -> Finding:
    """Look whether the parts of pysc2 that play can be imported."""
    if trouble := _trouble({"pysc2": requirements().get("pysc2", "")}):
        return missing(trouble, INSTALL)
    importlib.import_module("omagd.envs.sc2.client")  # pysc2 takes the messages that it makes
    for name in ("pysc2.run_configs", "pysc2.lib.sc_process"):
        importlib.import_module(name)
    return ok(f"{installed('pysc2')}: run_configs and sc_process load")


def smax(_settings: Settings) -> Finding:
    """Look at the extra; JAX itself is not started."""
    mend = "pip install -e .[smax] -c constraints.txt"
    wanted = {"jaxmarl": requirements("smax").get("jaxmarl", ""), "jax": "", "jaxlib": ""}
    if trouble := _trouble(wanted):
        return missing(trouble, mend)
    return ok(", ".join(f"{name} {installed(name)}" for name in wanted))


def wandb(_settings: Settings) -> Finding:
    """Look whether W&B would record, and where."""
    if trouble := _trouble({"wandb": requirements().get("wandb", "")}):
        return missing(trouble, f"{INSTALL}, or leave use_wandb=False")
    from omagd.run.reporting.wandb_sink import choose_mode

    mode = choose_mode()
    kinds = {"online": "online, a key is there", "offline": "offline, there is no key (`wandb login` takes one)"}
    return ok(f"{installed('wandb')}, use_wandb=True records {kinds.get(mode, f'with WANDB_MODE={mode}')}")


def tensorboard(_settings: Settings) -> Finding:
    """Look whether event files can be written."""
    if trouble := _trouble({"tensorboard": requirements().get("tensorboard", "")}):
        return missing(trouble, f"{INSTALL}, or leave use_tensorboard=False")
    return ok(installed("tensorboard"))


def installed(name: str) -> str:
    """Return the installed version of a package, empty where there is none."""
    try:
        return metadata.version(name) or ""
    except metadata.PackageNotFoundError:
        return ""


def requirements(extra: str = "") -> dict[str, str]:
    """Return what omagd asks of each package, by name ("torch": ">=2.10"), or what an extra asks beyond that."""
    project = _project()
    if project:
        lines = project["optional-dependencies"][extra] if extra else project["dependencies"]
    else:
        mark = re.compile(rf"extra == ['\"]{extra}['\"]" if extra else r"^(?!.*extra ==)")
        lines = [line for line in metadata.requires("omagd") or [] if mark.search(line)]
    found = (re.match(r"([\w.-]+)(?:\[[^]]*\])?\s*\(?([^;)]*)", line) for line in lines)
    return {match[1]: match[2].strip() for match in found if match}


def fits(version: str, spec: str) -> bool:
    """Return whether a version is one of ">=2.10,<3"."""
    from packaging.specifiers import SpecifierSet

    return SpecifierSet(spec).contains(version, prereleases=True)


def _project() -> dict[str, Any]:
    """Return [project] of pyproject.toml where omagd is used from its repository, else nothing."""
    path = ROOT / "pyproject.toml"
    project = tomllib.loads(path.read_text(encoding="utf-8")).get("project", {}) if path.is_file() else {}
    return project if project.get("name") == "omagd" else {}


def _requires_python() -> str:
    return str(_project().get("requires-python") or metadata.metadata("omagd")["Requires-Python"])


def _pinned() -> dict[str, str]:
    path = ROOT / "constraints.txt"
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    return dict(line.split("==", 1) for line in lines if "==" in line and not line.startswith("#"))


def _trouble(wanted: dict[str, str]) -> str:
    """Return which packages are not installed or do not fit, empty where all do."""
    lacking = [name for name in wanted if not installed(name)]
    if lacking:
        return f"not installed: {', '.join(lacking)}"
    wrong = [f"{name} {installed(name)} (needs {spec})" for name, spec in wanted.items() if not _suits(name, spec)]
    return f"do not fit: {', '.join(wrong)}" if wrong else ""


def _suits(name: str, spec: str) -> bool:
    return not spec or fits(installed(name), spec)
