"""One folder per run: names and paths of its files."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import os
import re
import stat
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from omagd.utils.held_folder import release
from omagd.utils.writing import STORAGE, replace_file

STUDY_FILE, STUDY_RUNS = "study.json", "runs"
"""In a study's folder: its state, and the folder of its runs."""

RUN_FILE = "run.json"
"""In a run's folder: what the run is, and whether it is finished."""


def fingerprint(values: Any) -> str:
    """Return the SHA-256 of JSON values, whatever the order of their keys."""
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def make_token(
    name: str, env: str, map_name: str, seed: int, now: float | None = None, *, evaluation: bool = False
) -> str:
    """Return the name of a run's folder: `<name>_<env>_<map>_seed<seed>_<date>_<time>`; a missing map is left out.

    Args:
        now: seconds since the epoch, this moment if None. Two runs in one second get the same token;
            `RunFolder.create` makes them differ. evaluation: add `evaluation` before the date.
    """
    stamp = time.strftime("%Y%m%d_%H%M%S", time.localtime(now))
    parts = [re.sub(r"[^\w.+-]+", "-", part) for part in (name, env, map_name) if part]
    return "_".join([*parts, f"seed{seed}", *(["evaluation"] * evaluation), stamp])


class RunFolder:
    """Paths of a run's files. Opening one creates nothing; `create` makes a new one.

    Args:
        path: `<local_results_path>/<unique_token>`.

    Attributes:
        token: the run's unique name.
        config_json: the resolved configuration. card_json: what the result depends on. env_info_json: facts about the
            environment. metrics_jsonl: one JSON object per log. summary_json: what the run reached.
        checkpoints, models, plots, logs, profile, replays: folders of checkpoints, weights, pictures, text logs, traces
            and recorded games.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path).absolute()
        self.token = self.path.name
        self.config_json, self.card_json = self.path / "config.json", self.path / "card.json"
        self.env_info_json, self.metrics_jsonl = self.path / "env_info.json", self.path / "metrics.jsonl"
        self.summary_json = self.path / "summary.json"
        self.checkpoints, self.models = self.path / "checkpoints", self.path / "models"
        self.plots, self.logs = self.path / "plots", self.path / "logs"
        self.profile, self.replays = self.path / "profile", self.path / "replays"

    @property
    def made_first(self) -> tuple[Path, ...]:
        """Folders that `create` makes."""
        return self.models, self.plots, self.logs

    @property
    def evaluations(self) -> Path:
        """Where evaluations of the run go: beside it, but not among the runs of a study, which are compared."""
        around = self.path.parent
        in_study = around.name == STUDY_RUNS and (around.parent / STUDY_FILE).is_file()
        return around.parent / "evaluations" if in_study else around

    @classmethod
    def create(
        cls, local_results_path: str | Path, unique_token: str, *, generated: bool = True, left: bool = False
    ) -> RunFolder:
        """Make a new folder under `local_results_path`; runs never share one.

        Args:
            generated: whether the name was made by `make_token`: then a taken one gets `_2`, `_3`, ...
            left: use the folder of that name that an earlier start has left behind.
        Errors: OSError where nothing can be written, FileExistsError among them for a taken name that a user gave.
        """
        root = Path(local_results_path).expanduser().absolute()
        root.mkdir(parents=True, exist_ok=True)
        for number in itertools.count(1):
            path = root / (unique_token if number == 1 else f"{unique_token}_{number}")
            try:
                path.mkdir(mode=0o755)  # with any umask: who else could write here could plant links
                release(path)  # of an earlier folder there
                break
            except FileExistsError:
                if left:
                    break
                if not generated:
                    raise
        folder = cls(path)
        for sub in folder.made_first:
            sub.mkdir(mode=0o755, exist_ok=True)
        return folder

    def files(self) -> tuple[Path, ...]:
        """Return the paths of the files that a run writes beside its episodes, text logs and weights."""
        return self.config_json, self.env_info_json, self.card_json, self.metrics_jsonl, self.summary_json

    def episode_log(self, rank: int) -> Path:
        """Return where a rank notes the episodes of its training, a JSON object each."""
        return self.path / "episodes" / f"rank_{rank}.jsonl"

    def episode_logs(self) -> list[Path]:
        """Return the notes of all ranks that are there."""
        found = (self.path / "episodes").glob("rank_*.jsonl")
        return sorted(path for path in found if path.stem.removeprefix("rank_").isdecimal())

    def step(self, t_env: int) -> Path:
        """Return the folder of the stage-3 weights at `t_env`."""
        return self.models / str(int(t_env))

    def pretrained(self, stage: str, best: bool = False) -> Path:
        """Return the folder of the weights of `stage1` or `stage2`."""
        return self.models / f"pretrain_{stage}{'_best' if best else ''}"

    def log(self, rank: int) -> Path:
        """Return the text log of a rank."""
        return self.logs / f"rank_{rank}.log"

    def saved_steps(self) -> list[int]:
        """Return the `t_env` of all saved stage-3 weights, ascending."""
        found = self.models.iterdir() if self.models.is_dir() else ()
        return sorted(int(path.name) for path in found if path.name.isdecimal() and path.is_dir())

    def half_written(self) -> list[Path]:
        """Return the temporary files that a killed process has left; none of another program's folder."""
        others = (self.path / name for name in ("episodes", "pretrain_buffer"))
        below = self.models, self.checkpoints, self.plots, self.replays, *others
        found = [*self.path.glob(".*.tmp"), *(path for folder in below for path in folder.rglob(".*.tmp"))]
        return [path for path in found if stat.S_ISREG(path.lstat().st_mode)]

    def artifacts(self) -> dict[str, str]:
        """Return the absolute paths of what is there, by name: files, folders of weights, pictures."""
        folders = [self.pretrained(stage, best) for stage in ("stage1", "stage2") for best in (False, True)]
        found = {path.stem: path for path in self.files() if path.is_file() and path != self.summary_json}
        found |= {path.name: path for path in folders if path.is_dir()}
        if steps := self.saved_steps():
            found["model"] = self.step(steps[-1])
        found |= {f"profile/{path.stem}": path for path in sorted(self.profile.glob("*.json"))}
        found |= {f"plots/{path.stem}": path for path in sorted(self.plots.glob("*.png"))}
        if self.replays.is_dir():
            found["replays"] = self.replays
        return {name: str(path) for name, path in found.items()}


def rank_of(episode_log: Path) -> int:
    """Return the rank whose episodes a file notes."""
    return int(episode_log.stem.removeprefix("rank_"))


def write_json(path: Path, value: Any) -> None:
    """Write `value` as JSON, whole or not at all: into a file beside it, which then takes its name.

    NaN and infinities become null; paths become text; NumPy and torch scalars and arrays become numbers and lists.
    Errors: OSError.
    """
    replace_file(path, _json(value))


def keep_json(path: Path, value: Any) -> bool:
    """Write what `write_json` writes, later where that is impossible now; return whether it was possible."""
    return STORAGE.write(path, _json(value))


def _json(value: Any) -> bytes:
    return (json.dumps(plain(value), indent=2, ensure_ascii=False, allow_nan=False) + "\n").encode()


def plain(value: Any) -> Any:
    """Return `value` as values of strict JSON. Errors: TypeError for other objects."""
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if value is None or isinstance(value, (str, bool, int)):
        return value
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if hasattr(value, "tolist"):
        return plain(value.tolist())
    raise TypeError(f"{type(value).__name__} has no place in a JSON file")
