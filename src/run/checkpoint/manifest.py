"""Types of the manifest and the parts of a checkpoint, validated once, when they are read.

A checksum proves that a file is as it was written, not that this program wrote it. Unknown keys are allowed: other
versions may have more.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from omagd.utils.run_folder import fingerprint

Count = Annotated[int, Field(ge=0, le=2**62)]
Stage = Literal["stage1", "stage2", "stage3"]
LONGEST_NAME = 255
PLAIN = re.compile(r"[^./][^/]*/[^./][^/]*")


class Form(BaseModel):
    """Base of the models: values must have exactly these types, nothing is converted."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)


class FileForm(Form):
    """A file below `checkpoints/`."""

    bytes: Count
    sha256: str


class RangeForm(Form):
    """A file of episodes."""

    first: Count
    count: Count
    file: str
    entry: FileForm
    codec: dict[str, Any] | None


class LogForm(Form):
    """A rank's episodes under a name."""

    added: Count
    kept: Count
    parts: list[RangeForm]


class ManifestForm(Form):
    """`manifest.json`."""

    world_size: Annotated[int, Field(ge=1)]
    iteration: Count
    stage: Stage
    t_env: Count
    clock: dict[str, Count]
    score: float | None
    files: dict[str, FileForm]
    logs: list[dict[str, LogForm]]

    @model_validator(mode="after")
    def _fits(self) -> ManifestForm:
        for name in self.files:
            if not _is_inside(name):
                raise ValueError(f"{name[:80]!a} is no file of a checkpoint")
        if len(self.logs) != self.world_size:
            raise ValueError(f"logs of {len(self.logs)} ranks instead of {self.world_size}")
        for part in (part for rank in self.logs for log in rank.values() for part in log.parts):
            if part.file not in self.files:
                raise ValueError(f"{part.file[:80]!a} does not belong to it")
        if self.stage != "stage3" and "epoch" not in self.clock:
            raise ValueError("clock: no epoch")
        return self


class ResultForm(Form):
    """A finished stage."""

    model_config = ConfigDict(strict=True, extra="forbid")

    name: Stage
    clock: dict[str, int]
    values: dict[str, Any]
    files: dict[str, str]
    facts: dict[str, Any]


class RunForm(Form):
    """What the run has logged."""

    wall_seconds: float
    metrics_bytes: Count
    sinks: dict[str, dict[str, Any]]
    earlier_ranks: dict[Count, Count] = {}


class CommonForm(Form):
    """`common.th`."""

    stage: Stage | None
    finished: list[ResultForm]
    products: dict[str, str]
    modules: dict[str, str]
    shared: dict[str, Any]
    run: RunForm


class RankForm(Form):
    """`rank_<r>.th`."""

    stage: dict[str, Any]
    random: dict[str, Any]
    runners: dict[str, Any]
    past: dict[str, float]
    episode_bytes: Count


def sealed(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """Return a manifest with a checksum of its content under `seal`."""
    content = {key: value for key, value in manifest.items() if key != "seal"}
    return {**content, "seal": fingerprint(content)}


def misfit(form: type[Form], value: Mapping[str, Any]) -> str:
    """Return what is wrong with a value, empty if it fits the form."""
    try:
        form.model_validate(value)
    except ValidationError as problem:
        first = problem.errors(include_url=False, include_input=False, include_context=False)[0]
        place = ".".join(str(part)[:40] for part in first["loc"])
        return f"{place}: {first['msg']}" if place else str(first["msg"])
    return ""


def _is_inside(name: str) -> bool:
    """Return whether a name is `<folder>/<file>`, both plain and of a length that a disk takes."""
    sizes = [len(part.encode(errors="replace")) for part in name.split("/")]
    return bool(PLAIN.fullmatch(name)) and name.isprintable() and max(sizes) <= LONGEST_NAME
