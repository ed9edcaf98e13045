"""Records a run with Sacred: configuration, versions, output, scalars."""

from __future__ import annotations

import json
import logging
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from omagd.config.loading import to_plain
from omagd.config.schema import Config
from omagd.run.launchers import in_group, is_main
from omagd.utils.errors import UserError
from omagd.utils.logging import PACKAGE, setup_logging
from omagd.utils.storage import STORAGE, AppendFile, FolderGone, hold, open_records, release

# Sacred imports pandas where it is installed: a tenth of a start, for data frames that no configuration here holds.
_hidden = {} if "pandas" in sys.modules else {"pandas": None}
sys.modules.update(_hidden)  # type: ignore[arg-type]
from sacred import SETTINGS, Experiment  # noqa: E402
from sacred.observers import FileStorageObserver  # noqa: E402
from sacred.serializer import flatten  # noqa: E402

for _name in _hidden:
    del sys.modules[_name]


class StoredObserver(FileStorageObserver):
    """Writes Sacred's files.

    They are written through `STORAGE`: a full disk neither ends the record nor leaves half a file.
    """

    def started_event(self, *args: Any, **facts: Any) -> str | None:
        """Start a record and return its name; if the folder cannot be written, warn and continue without a record."""
        try:
            name = str(super().started_event(*args, **facts))  # type: ignore[no-untyped-call]
            self.dir = os.path.abspath(str(self.dir))
            hold(Path(self.dir))
            return name
        except OSError as problem:
            if self.dir is not None:
                with suppress(OSError):
                    os.rmdir(self.dir)
            self.dir, self.template, self.run_entry = None, None, {}  # later events of Sacred's class read them
            without = "this run has no Sacred record; --file_storage=DIR puts it elsewhere"
            setup_logging(None).warning(f"{self.basedir} cannot be written ({problem.strerror}): {without}")
            return None

    def discard(self) -> None:
        """Remove the record of a start that was rejected before it had a run folder."""
        if self.dir is not None:
            shutil.rmtree(self.dir, ignore_errors=True)

    def save_json(self, obj: Any, filename: str) -> None:
        """Write a file of the record."""
        if self.dir is not None:
            content = json.dumps(flatten(obj), sort_keys=True, indent=2).encode()
            with self._while_there():
                STORAGE.write(Path(str(self.dir)) / filename, content)

    def save_cout(self) -> None:
        """Append the new output."""
        new = self.cout[self.cout_write_cursor :]
        self.cout_write_cursor = len(self.cout)
        if new and self.dir is not None:
            if not hasattr(self, "_cout"):
                self._cout = AppendFile(Path(str(self.dir)) / "cout.txt", open_records)
            with self._while_there():
                self._cout.write(new.encode(errors="backslashreplace"))

    @contextmanager
    def _while_there(self) -> Iterator[None]:
        """End the record, with a warning, where its folder was taken away: the run goes on without it."""
        try:
            yield
        except FolderGone:
            reason, self.dir = f"{self.dir} was moved or deleted", None
            logging.getLogger(PACKAGE).warning(f"the Sacred record ends here: {reason}")

    def log_metrics(self, metrics_by_name: Mapping[str, Any], info: Mapping[str, Any]) -> None:
        """Add new values by name to the file, which is read and written again."""
        if metrics_by_name and self.dir is not None:
            super().log_metrics(metrics_by_name, info)  # type: ignore[no-untyped-call]


RunMode = Callable[[Any, Config, logging.Logger], Any]


def run_recorded(
    config: Config,
    run_mode: RunMode,
    *,
    observe: bool = True,
    folder: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Any:
    """Call `run_mode(_run, config, log)` within a Sacred run and return its result.

    Args:
        config: recorded key by key.
        observe: whether to write files; False on ranks other than 0.
        folder: of Sacred's records; None: `<local_results_path>/sacred`.
        options: Sacred's own command-line options by flag, such as {"--comment": "why"}.

    Errors: UserError if the folder cannot be created; errors of `run_mode`, recorded as FAILED or INTERRUPTED. A
        UserError before the run has a folder leaves no record.
    """
    where = _records(config, folder) if observe else None
    experiment = _experiment()
    experiment.add_config(to_plain(config))
    if where is not None:
        experiment.observers.append(StoredObserver(str(where)))
    started: list[Any] = []

    def main(_run: Any, _log: logging.Logger) -> None:
        started.append(_run)
        _run.info["result"] = run_mode(_run, config, _log)

    experiment.main(main)
    experiment.logger = setup_logging(None, rank=0 if is_main() else 1)
    sacreds = experiment.logger.getChild(experiment.path)
    sacreds.addFilter(_is_needed)
    try:
        experiment.run(options={**(options or {}), "--unobserved": not observe})
    except UserError:
        # Ranks of torchrun do not report their folder here: keep their records.
        if started and "folder" not in started[0].info and not in_group():
            for observer in started[0].observers:
                observer.discard()
        raise
    finally:
        sacreds.removeFilter(_is_needed)
        STORAGE.close()
        for observer in experiment.observers:
            release(Path(str(observer.dir)))
    return started[0].info["result"]


def _is_needed(record: logging.LogRecord) -> bool:
    """Return False for Sacred's messages on the start and the end of a run, which the program reports itself."""
    return not str(record.msg).startswith(("Running command", "Started", "Completed", "Failed after", "Aborted after"))


def _records(config: Config, folder: str | None) -> Path:
    """Return the folder of the records, created if missing. Errors: UserError if it cannot be created."""
    results = Path(config.local_results_path).expanduser()
    where = results / "sacred" if folder is None else Path(folder).expanduser()
    if folder is None and where.is_symlink():
        fix = "Remove it, or pass the folder that it points to as --file_storage"
        raise UserError(f"local_results_path={config.local_results_path}: its sacred/ is a link. {fix}")
    try:
        where.mkdir(parents=True, exist_ok=True)
    except OSError as problem:
        given = f"local_results_path={config.local_results_path}" if folder is None else f"--file_storage={folder}"
        raise UserError(f"{given}: cannot be written ({problem.strerror}). Give a writable folder") from None
    return where


def _experiment() -> Any:
    """Return a Sacred experiment that records versions, but neither environment variables nor git remotes."""
    # `fd` would wait for the output of children and hide the terminal from the progress bar.
    SETTINGS.CAPTURE_MODE = "sys"
    SETTINGS.DISCOVER_SOURCES = "none"
    SETTINGS.DISCOVER_DEPENDENCIES = "pkg"
    SETTINGS.HOST_INFO.CAPTURED_ENV = []
    return Experiment("omagd", save_git_info=False, base_dir=str(Path(__file__).resolve().parent))
