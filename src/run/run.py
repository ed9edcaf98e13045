"""`run=default`: train in this process. `run=ddp`: one process per device, or a rank of torchrun's group.

A list of seeds is trained one after another.
"""

from __future__ import annotations

import hashlib
import os
import shlex
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from omagd.config.loading import validate
from omagd.config.schema import Config
from omagd.run.checkpoint.resuming import identity_of, is_trusted, same_runs
from omagd.run.launch.launcher import launch
from omagd.run.launchers import is_main
from omagd.run.reporting.report import render_summary
from omagd.utils.errors import UserError, readable, visible
from omagd.utils.logging import setup_logging
from omagd.utils.run_folder import RUN_FILE, RunFolder, keep_json, make_token
from omagd.utils.storage import OUTPUT, STORAGE, patiently, read_entry


def run(_run: Any, _config: Mapping[str, Any] | Config, _log: Any = None) -> dict[str, Any]:
    """Run once, or once for each of `seeds`; print the results and return them.

    Args:
        _run: Sacred's run, or None. _config: the resolved configuration. _log: Sacred's logger.
    """
    try:
        return _run_all(_run, _config)
    finally:
        if _run is None:  # else Sacred still writes its record
            STORAGE.close()


def _run_all(_run: Any, _config: Mapping[str, Any] | Config) -> dict[str, Any]:
    config = _absolute(_config if isinstance(_config, Config) else validate(dict(_config)))
    if len(config.seeds) < 2:
        (seed,) = config.seeds or (config.seed,)
        return _run_one(_run, config.model_copy(update={"seed": seed, "seeds": ()}), lambda folder: None)
    listed = SeedList(config)
    finished = listed.finished_runs()
    summaries = []
    for single in listed.singles:
        started = partial(listed.started, single.seed)
        summaries.append(finished.get(single.seed) or _run_one(_run, single, started))
    folders = " ".join(shlex.quote(str(summary["folder"])) for summary in summaries)
    _show(f"{len(summaries)} seeds: python -m omagd compare --each {folders}")
    return {"runs": summaries}


def _absolute(config: Config) -> Config:
    """Return `config` with absolute paths of pre-trained modules: it may be evaluated from another directory."""
    keys = ("pretrained_tokenizer_path", "pretrained_mask_predictor_path")
    given = {key: getattr(config, key) for key in keys if getattr(config, key)}
    return config.model_copy(update={key: str(Path(path).expanduser().absolute()) for key, path in given.items()})


def _run_one(_run: Any, config: Config, started: Callable[[str], None]) -> dict[str, Any]:
    """Launch one run; `started` is called with its folder before it trains."""

    def found(folder: str) -> None:
        if _run is not None:
            _run.info["folder"] = folder
        started(folder)

    facts = config.name, config.env, config.map_name, config.seed
    token = config.unique_token or make_token(*facts, evaluation=config.evaluate)
    summary = launch(config, token, _run, found)
    _show(render_summary(summary))
    return summary


def _show(text: str) -> None:
    if not is_main():
        return
    try:
        sys.stdout.write(visible(text + "\n", kept="\n"))
        sys.stdout.flush()
    except OSError as problem:
        STORAGE.failed(OUTPUT, problem)


class SeedList:
    """The runs of `seeds=1,2,3`, which a later start can resume.

    A file in `local_results_path` names the run folder of each seed that has started. It is written before the run
    trains. Where it is damaged, the newest run of each seed counts.

    Args:
        config: with all its `seeds`.
    """

    def __init__(self, config: Config) -> None:
        self.config = config
        self.singles = [config.model_copy(update={"seed": seed, "seeds": ()}) for seed in config.seeds]
        self.root = Path(config.local_results_path).expanduser().absolute()
        common = identity_of(config.model_copy(update={"seed": 0, "seeds": ()}))
        name = hashlib.sha256(f"{common} {config.seeds}".encode()).hexdigest()[:16]
        self.file = self.root / f".seeds_{name}.json"
        self._folders: dict[str, str] = {}

    def finished_runs(self) -> dict[int, dict[str, Any]]:
        """Return the summaries of an interrupted list's finished runs by seed; none if a new list starts."""
        if not self.config.auto_resume or self.config.evaluate:
            return {}
        console = setup_logging(None)
        named = ",".join(map(str, self.config.seeds))
        entry = patiently(self.file, partial(read_entry, self.file, strict=True)).get("runs")
        started = dict(entry) if isinstance(entry, dict) else {}
        damaged = not started and os.path.lexists(self.file)
        found = {}
        for single in self.singles:
            name = started.get(str(single.seed))
            if damaged or (name is not None and not self._is_run(single, name)):
                damaged, name = True, self._newest(single)
                started[str(single.seed)] = name
            summary = self._summary(single, name)
            if summary is not None:
                found[single.seed] = summary
        if len(found) == len(self.singles):
            if damaged:
                raise UserError(
                    f"auto_resume=True: {self.file} is damaged, and each of seeds={named} has a finished run:"
                    " auto_resume=False starts a new list, or remove that file"
                )
            console.info(f"auto_resume=True: all runs of seeds={named} are finished already; a new list begins")
            return {}
        if damaged:
            console.warning(f"auto_resume=True: {self.file} is damaged; the newest run of each seed counts instead")
        self._folders = {seed: name for seed, name in started.items() if isinstance(name, str)} if found else {}
        for seed, summary in found.items():
            console.info(f"auto_resume=True: seed {seed} is finished: {readable(summary['folder'])}")
        return found

    def _is_run(self, single: Config, name: object) -> bool:
        """Return whether a name is that of a folder with a run of this seed."""
        if not isinstance(name, str) or Path(name).name != name:
            return False
        return read_entry(self.root / name / RUN_FILE).get("identity") == identity_of(single)

    def _newest(self, single: Config) -> str | None:
        """Return the name of the folder of the newest run of a seed."""
        return next((path.name for path in same_runs(self.root, identity_of(single))), None)

    def started(self, seed: int, folder: str) -> None:
        """Record the run folder of a seed before it trains."""
        if not self.config.evaluate:
            self._folders[str(seed)] = Path(folder).name
            keep_json(self.file, {"seeds": list(self.config.seeds), "runs": self._folders})

    def _summary(self, single: Config, name: object) -> dict[str, Any] | None:
        """Return the summary of a seed's finished run; None if there is none."""
        if not self._is_run(single, name):
            return None
        folder = RunFolder(self.root / str(name))
        if not read_entry(folder.path / RUN_FILE).get("finished"):
            return None
        if not is_trusted(folder.path, "does not count as finished"):
            return None
        known = {"name": single.name, "env": single.env, "map_name": single.map_name, "exit_state": "completed"}
        return {**known, **read_entry(folder.summary_json), "seed": single.seed, "folder": str(folder.path)}
