"""`run=default`: train in this process. `run=ddp`: one process per device, or a rank of torchrun's group.

A list of seeds is trained one after another; with `auto_resume` those that are finished are skipped.
"""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from omagd.config.loading import validate
from omagd.config.schema import Config
from omagd.run.checkpoint.resuming import identity_of, is_trusted, same_runs
from omagd.run.launch.launcher import launch
from omagd.run.launchers import is_main
from omagd.run.reporting.log_sinks import SacredScalars
from omagd.run.reporting.report import nearby, program, render_summary
from omagd.run.run_folder import RUN_FILE, RunFolder, make_token, read_entry
from omagd.utils.errors import readable, visible
from omagd.utils.logging import setup_logging
from omagd.utils.storage import OUTPUT, STORAGE


def run(_run: Any, _config: Mapping[str, Any] | Config, _log: Any = None) -> dict[str, Any]:
    """Run once, or once for each of `seeds`; print the results and return them."""
    try:
        return _run_all(_run, _config)
    finally:
        if _run is None:  # else Sacred still writes its record
            STORAGE.close()


def _run_all(_run: Any, _config: Mapping[str, Any] | Config) -> dict[str, Any]:
    config = _absolute(_config if isinstance(_config, Config) else validate(dict(_config)))
    singles = [config.model_copy(update={"seed": seed, "seeds": ()}) for seed in config.seeds or (config.seed,)]
    if len(singles) == 1:
        return _run_one(_run, singles[0])
    finished = _finished_runs(singles)
    summaries = [finished.get(single.seed) or _run_one(_run, single, f"seed{single.seed}/") for single in singles]
    folders = " ".join(shlex.quote(nearby(str(summary["folder"]))) for summary in summaries)
    _show(f"{len(summaries)} seeds: {program()} compare --each {folders}")
    return {"runs": summaries}


def _absolute(config: Config) -> Config:
    """Return `config` with absolute paths of pre-trained modules: it may be evaluated from another directory."""
    keys = ("pretrained_tokenizer_path", "pretrained_mask_predictor_path")
    given = {key: getattr(config, key) for key in keys if getattr(config, key)}
    return config.model_copy(update={key: str(Path(path).expanduser().absolute()) for key, path in given.items()})


def _run_one(_run: Any, config: Config, prefix: str = "") -> dict[str, Any]:
    """Launch one run; Sacred's run notes its folder before it trains. prefix: of the names of Sacred's scalars."""
    began, facts = time.time(), (config.name, config.env, config.map_name, config.seed)
    token = config.unique_token or make_token(*facts, evaluation=config.evaluate)
    started = (lambda folder: None) if _run is None else partial(_run.info.__setitem__, "folder")
    summary = launch(config, token, None if _run is None else SacredScalars(_run, prefix), started)
    _show(render_summary(summary, time.time() - began))
    return summary


def _show(text: str) -> None:
    if not is_main():
        return
    try:
        sys.stdout.write(visible(text + "\n", kept="\n"))
        sys.stdout.flush()
    except OSError as problem:
        STORAGE.failed(OUTPUT, problem)


def _finished_runs(singles: list[Config]) -> dict[int, dict[str, Any]]:
    """Return the summaries of the seeds that are finished; none where all are: then a new list begins.

    A seed is finished if its newest run is, and that is newer than those of the seeds before it: else of an older list.
    """
    if not singles[0].auto_resume or singles[0].evaluate:
        return {}
    console, root = setup_logging(None), Path(singles[0].local_results_path).expanduser().absolute()
    found, latest = {}, 0.0
    for single in singles:
        paths = same_runs(root, identity_of(single))
        newest = next((path for path in paths if is_trusted(path, "does not count as finished")), None)
        if newest is None:
            continue
        began = (newest / RUN_FILE).stat().st_mtime
        if began >= latest and read_entry(newest / RUN_FILE).get("finished"):
            known = {"name": single.name, "env": single.env, "map_name": single.map_name, "exit_state": "completed"}
            summary = read_entry(RunFolder(newest).summary_json)
            found[single.seed] = {**known, **summary, "seed": single.seed, "folder": str(newest)}
        latest = max(latest, began)
    if len(found) == len(singles):
        console.info("auto_resume=True: the runs of all these seeds are finished already; a new list begins")
        return {}
    for seed, summary in found.items():
        console.info(f"auto_resume=True: seed {seed} is finished: {readable(summary['folder'])}")
    return found
