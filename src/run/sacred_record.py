"""Sacred as the recorder of a run: configuration, versions, output, scalars."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from omagd.config.loading import to_plain
from omagd.config.schema import Config
from omagd.utils.errors import UserError
from omagd.utils.writing import STORAGE

RunMode = Callable[[Any, Config, logging.Logger], Any]


def run_recorded(
    config: Config,
    run_mode: RunMode,
    *,
    observe: bool = True,
    folder: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Any:
    """Call `run_mode(_run, config, log)` within a Sacred run and return what it returns.

    Args:
        config: recorded key by key.
        observe: whether files are written; False on every rank but the first.
        folder: where Sacred's records go, `<local_results_path>/sacred` if None.
        options: Sacred's own command-line options by flag, such as {"--comment": "why"}.

    Errors: UserError where the folder of the records cannot be made; whatever `run_mode` raises, recorded as FAILED or
        INTERRUPTED. A UserError before there is a run folder leaves no record.
    """
    where = _records(config, folder) if observe else None
    experiment = _experiment()
    experiment.add_config(to_plain(config))
    if where is not None:
        from omagd.run.sacred_observer import BoundedObserver

        experiment.observers.append(BoundedObserver(str(where)))
    returned: list[Any] = []
    begun: list[Any] = []

    def main(_run: Any, _log: logging.Logger) -> None:
        begun.append(_run)
        result = run_mode(_run, config, _log)
        returned.append(result)
        _run.info["result"] = result

    experiment.main(main)
    logger = logging.getLogger("omagd")
    logger.addFilter(_is_needed)
    try:
        experiment.run(options={**(options or {}), "--unobserved": not observe})
    except UserError:
        # Ranks of torchrun do not report their folder here, so their records stay.
        if begun and "folder" not in begun[0].info and "RANK" not in os.environ:
            for observer in begun[0].observers:
                observer.discard()
        raise
    finally:
        logger.removeFilter(_is_needed)
        STORAGE.close()
    return returned[0]


def _is_needed(record: logging.LogRecord) -> bool:
    """Return False for Sacred's lines on the start and the failure of a run: the program has lines of its own."""
    sacreds = "sacred" in Path(record.pathname).parts and record.module == "run"
    return not (sacreds and str(record.msg).startswith(("Running command", "Started", "Failed after", "Aborted after")))


def _records(config: Config, folder: str | None) -> Path:
    """Return the folder of the records, made where it was missing. Errors: UserError where it cannot be."""
    results = Path(config.local_results_path).expanduser()
    where = results / "sacred" if folder is None else Path(folder).expanduser()
    if folder is None and where.is_symlink():
        mend = "Remove it, or name the folder that it leads to by --file_storage"
        raise UserError(f"local_results_path={config.local_results_path}: its sacred/ is a link. {mend}")
    try:
        where.mkdir(parents=True, exist_ok=True)
    except OSError as problem:
        told = f"local_results_path={config.local_results_path}" if folder is None else f"--file_storage={folder}"
        raise UserError(f"{told}: cannot be written ({problem.strerror}). Give a folder that can be") from None
    return where


def _experiment() -> Any:
    """Return an empty experiment: it records versions, but no environment variables and no address of a git remote."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # pkg_resources announces its own end
        warnings.simplefilter("ignore", DeprecationWarning)
        from sacred import SETTINGS, Experiment

        # `fd` waits for children's output and hides from the progress bar that this is a terminal; every rank has a
        # log file of its own.
        SETTINGS.CAPTURE_MODE = "sys"
        SETTINGS.DISCOVER_SOURCES = "none"
        SETTINGS.DISCOVER_DEPENDENCIES = "pkg"
        SETTINGS.HOST_INFO.CAPTURED_ENV = []
        return Experiment("omagd", save_git_info=False, base_dir=str(Path(__file__).resolve().parent))
