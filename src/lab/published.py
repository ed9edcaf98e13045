"""Published policies (docs/weights.md): sets in a folder or on a server, and checked copies in the user's cache.

A set has `index.json` and a folder for each policy, `<env>/<map>/<name>`. Its copy has the form of a run's folder, so
whatever takes the folder of a run takes that copy.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable
from contextlib import closing, suppress
from http.client import HTTPException
from pathlib import Path
from typing import Annotated, Any, Literal, get_args
from urllib.parse import quote
from urllib.request import urlopen

from pydantic import BaseModel, Field, ValidationError
from safetensors import SafetensorError
from safetensors.torch import load

import omagd
from omagd.run.checkpoint.store import serialized
from omagd.run.checkpoint.weights import AGENT_FILE
from omagd.run.run_folder import RunFolder, read_entry, write_json
from omagd.utils.compiling import user_cache
from omagd.utils.errors import UserError, unknown_name
from omagd.utils.logging import Progress
from omagd.utils.storage import replace_file

INDEX, AGENT, GOT = "index.json", "agent.safetensors", "published.json"
SHIPPED = str(Path(omagd.__path__[0]).parent / "weights")  # of the repository that omagd runs from
LONGEST_INDEX, LARGEST, BLOCK = 16 << 20, 1 << 30, 1 << 16
SECONDS = 20.0  # longest wait for a server to go on

PART = r"[A-Za-z0-9_][A-Za-z0-9_.+-]*"
NAME = f"^{PART}/{PART}/{PART}$"
"""What policies are called: no part begins with a dot, so none leads out of the folder of a set."""

FileName = Literal["agent.safetensors", "config.json", "env_info.json", "card.json", "battle.png"]
FILES: tuple[FileName, ...] = get_args(FileName)


class Stored(BaseModel):
    """One file of a policy."""

    sha256: str
    size: int = Field(ge=0, le=LARGEST)

    @classmethod
    def of(cls, content: bytes) -> Stored:
        """Return what an index says of a file."""
        return cls(sha256=hashlib.sha256(content).hexdigest(), size=len(content))


class Policy(BaseModel):
    """What an index says of a policy.

    Attributes:
        files: by name. win_rate: over `episodes` greedy episodes; None where nothing can be won. interval: of 95 %.
        seed, steps, version: of the training: its seed, environment steps, and OMAGD's version.
    """

    files: dict[FileName, Stored]
    win_rate: float | None
    interval: tuple[float, float] | None
    return_mean: float
    episodes: int
    seed: int
    steps: int = Field(ge=0)
    version: str

    def line(self) -> str:
        """Return what it reaches, in words."""
        reaches = f"return {self.return_mean:.2f}"
        if self.win_rate is not None and self.interval is not None:
            reaches = f"win rate {self.win_rate:.3f} [{self.interval[0]:.3f}, {self.interval[1]:.3f}]"
        return f"{reaches} over {self.episodes:,} episodes; seed {self.seed}, {self.steps:,} steps, {self.version}"


class Index(BaseModel):
    """Content of `index.json`."""

    format: Literal[1] = 1
    policies: dict[Annotated[str, Field(pattern=NAME)], Policy] = {}


def _read(source: str, name: str, most: int, came: Callable[[int], None] = lambda _: None) -> bytes:
    """Return the content of a file of a set, cut off behind `most` bytes; `came` hears how many. Errors: UserError."""
    web, content = _is_web(source), bytearray()
    place = f"{source.rstrip('/')}/{quote(name)}" if web else os.path.join(os.path.expanduser(source), name)
    try:
        with urlopen(place, timeout=SECONDS) if web else open(place, "rb") as file:
            while part := file.read(min(BLOCK, most + 1 - len(content))):
                content += part
                came(len(part))
            if getattr(file, "length", 0) and len(content) <= most:  # less came than the server said
                raise OSError(f"broke off after {len(content):,} bytes")
        return bytes(content)
    except (OSError, HTTPException, ValueError) as problem:
        reason = getattr(problem, "reason", None) or getattr(problem, "strerror", None) or problem
        fix = "Check address and network" if web else f"Give a folder with {INDEX}, or its http(s) address, by --from"
        raise UserError(f"weights: {place} cannot be read ({reason}). {fix}") from problem


def _is_web(source: str) -> bool:
    return source.startswith(("http://", "https://"))


def read_index(source: str) -> Index:
    """Return the index of a set. Errors: UserError where there is none, or where it is not one."""
    if source == SHIPPED and not os.path.isdir(SHIPPED):
        get = "`omagd weights get NAME --from CLONE/weights`"
        raise UserError(f"weights: policies come with a clone of the repository, not with the package: {get}")
    content = _read(source, INDEX, LONGEST_INDEX)
    try:
        return Index.model_validate_json(content)
    except ValidationError as problem:
        first = problem.errors()[0]
        where = "/".join(map(str, first["loc"])) or "the file"
        raise UserError(
            f"weights: {source}/{INDEX} is no index of policies ({where}: {first['msg']}). Give the folder or"
            " address of one that `omagd weights pack` wrote"
        ) from problem


def folder_of(name: str) -> Path:
    """Return the copy of a policy, which is got where there is none yet. Errors: UserError.

    The set beside the sources changes with them, so what was got there is compared with it again.
    """
    copy = user_cache("weights", *name.split("/"))
    source = read_entry(copy / GOT).get("source")
    return copy if source and source != SHIPPED else fetch(name, SHIPPED)[0]


def fetch(name: str, source: str) -> tuple[Path, Policy]:
    """Copy a policy of a set into the cache, checked against the index.

    Args:
        name: `<env>/<map>/<name>`. source: folder or address of the set.
    Returns: the copy, in the form of a run's folder, and what the index says.
    Errors: UserError; then nothing of the policy is used, and a former copy stays.
    """
    policies = read_index(source).policies
    if name not in policies:
        raise unknown_name("policy", name, policies)
    policy, copy = policies[name], user_cache("weights", *name.split("/"))
    # Clones share this cache: each compares what was got with its own set.
    facts = {"source": source if source != SHIPPED else "", **policy.model_dump(mode="json")}
    if read_entry(copy / GOT) == facts:
        return copy, policy
    total = sum(stored.size for stored in policy.files.values())
    with closing(Progress(total, "byte", name, enabled=_is_web(source))) as bar:
        parts = {file: _read(source, f"{name}/{file}", each.size, bar.update) for file, each in policy.files.items()}
    for file, content in parts.items():
        if Stored.of(content) != policy.files[file]:
            raise UserError(
                f"weights: {source}/{name}/{file} is not the file whose checksum {INDEX} has: damaged or changed."
                " Nothing of it is used; try again, or give another set by --from"
            )
    try:
        _install(copy, parts, facts)
    except (OSError, KeyError, SafetensorError) as problem:  # a full disk; a set without an agent
        raise UserError(f"weights: {copy} cannot be made of {source}/{name} ({problem})") from problem
    return copy, policy


def _install(copy: Path, parts: dict[FileName, bytes], facts: dict[str, Any]) -> None:
    """Make the folder of a run of the files of a policy, in place of the former copy."""
    weights = serialized(load(parts.pop("agent.safetensors")))
    copy.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=copy.parent, prefix=".") as beside:
        made = RunFolder(Path(beside, copy.name))
        made.path.mkdir()
        for file, content in parts.items():
            (made.path / file).write_bytes(content)
        replace_file(made.step(facts["steps"]) / AGENT_FILE, weights)
        write_json(made.path / GOT, facts)
        with suppress(FileNotFoundError):
            shutil.move(copy, Path(beside, "former"))
        os.rename(made.path, copy)
