"""`run=default`: one process."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from omagd.config.loading import validate
from omagd.config.schema import Config
from omagd.run.launch.launcher import launch
from omagd.run.launch.seed_list import SeedList
from omagd.run.reporting.report import render_summary, seeds_table
from omagd.run.reporting.sacred_sink import SacredRelay
from omagd.run.topology import is_main, make_plan
from omagd.utils.errors import visible
from omagd.utils.run_folder import make_token
from omagd.utils.writing import OUTPUT, STORAGE


def run(_run: Any, _config: Mapping[str, Any], _log: Any) -> dict[str, Any]:
    """Train in this process.

    Args:
        _run: Sacred's run, or None. _config: the resolved configuration. _log: Sacred's logger.
    """
    return run_seeds(_run, _config)


def run_seeds(_run: Any, _config: Mapping[str, Any] | Config) -> dict[str, Any]:
    """Run once, or once for each of `seeds`; show what was reached and return it."""
    if _run is not None:  # "Aborted after …": the last line of an interrupted run says more
        _run.run_logger.addFilter(lambda record: not str(record.msg).startswith("Aborted after"))
    try:
        return _run_all(_run, _config)
    finally:
        if _run is None:  # else Sacred still writes its record
            STORAGE.close()


def _run_all(_run: Any, _config: Mapping[str, Any] | Config) -> dict[str, Any]:
    config = _absolute(_config if isinstance(_config, Config) else validate(dict(_config)))
    if len(config.seeds) < 2:
        (seed,) = config.seeds or (config.seed,)
        return _run_one(_run, config.model_copy(update={"seed": seed, "seeds": ()}), _nothing)
    listed = SeedList(config)
    finished = listed.take_up()
    summaries = []
    for single in listed.singles:
        begun = partial(listed.begun, single.seed)
        summaries.append(finished.get(single.seed) or _run_one(_run, single, begun))
    _show(seeds_table(summaries))
    return {"runs": summaries}


def _absolute(config: Config) -> Config:
    """Return `config` with the paths of pre-trained modules made absolute: who plays the run may stand elsewhere."""
    keys = ("pretrained_tokenizer_path", "pretrained_mask_predictor_path")
    given = {key: getattr(config, key) for key in keys if getattr(config, key)}
    return config.model_copy(update={key: str(Path(path).expanduser().absolute()) for key, path in given.items()})


def _nothing(folder: str) -> None:
    """Note nothing about a run that has begun in `folder`."""


def _run_one(_run: Any, config: Config, begun: Callable[[str], None]) -> dict[str, Any]:
    def found(folder: str) -> None:
        if _run is not None:
            _run.info["folder"] = folder
        begun(folder)

    facts = config.name, config.env, config.map_name, config.seed
    token = config.unique_token or make_token(*facts, evaluation=config.evaluate)
    if _run is None or not make_plan(config).spawns:
        summary = launch(config, token, _run, found)
    else:
        relay = SacredRelay(_run)
        try:
            summary = launch(config, token, relay.sender, found)
        finally:
            relay.stop()
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
