"""A list of seeds as one unit: which of its runs are finished is on disk, so that a killed list can be continued."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from omagd.config.checks import is_file
from omagd.config.schema import Config
from omagd.run.checkpoint.resuming import RUN_FILE, identity_of
from omagd.utils.errors import readable
from omagd.utils.logging import setup_logging
from omagd.utils.owned_folder import Untrusted, read_entry, require_own
from omagd.utils.run_folder import RunFolder, keep_json


class SeedList:
    """The runs of `seeds=1,2,3`, in one start or several.

    A file in `local_results_path` names the folder of each seed that has begun: a new one for each list that is started
    from scratch. A run is in it before it trains, so a finished one is always found.

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

    def take_up(self) -> dict[int, dict[str, Any]]:
        """Return the summaries of the seeds that an interrupted list has finished, by seed; none for a new list."""
        if not self.config.auto_resume or self.config.evaluate:
            return {}
        console = setup_logging(None)
        named = ",".join(map(str, self.config.seeds))
        entry = read_entry(self.file).get("runs")
        if entry is None and is_file(self.file):
            console.warning(f"auto_resume=True: {self.file} cannot be read; the list seeds={named} starts from scratch")
        begun = {str(seed): name for seed, name in entry.items()} if isinstance(entry, dict) else {}
        found = {}
        for single in self.singles:
            summary = self._summary(single, begun.get(str(single.seed)))
            if summary is not None:
                found[single.seed] = summary
        if len(found) == len(self.singles):
            console.info(f"auto_resume=True: all runs of seeds={named} are finished already; a new list begins")
            return {}
        self._folders = {seed: name for seed, name in begun.items() if isinstance(name, str)} if found else {}
        for seed, summary in found.items():
            console.info(f"auto_resume=True: seed {seed} is finished: {readable(summary['folder'])}")
        return found

    def begun(self, seed: int, folder: str) -> None:
        """Note where the run of a seed is, before it trains."""
        if not self.config.evaluate:
            self._folders[str(seed)] = Path(folder).name
            keep_json(self.file, {"seeds": list(self.config.seeds), "runs": self._folders})

    def _summary(self, single: Config, name: object) -> dict[str, Any] | None:
        """Return the summary of a finished run of this seed; None where there is none."""
        if not isinstance(name, str) or Path(name).name != name:
            return None
        folder = RunFolder(self.root / name)
        run = read_entry(folder.path / RUN_FILE)
        if not run.get("finished") or run.get("identity") != identity_of(single):
            return None
        try:
            require_own(folder.path)
        except (Untrusted, OSError) as problem:
            why = problem.strerror if isinstance(problem, OSError) else problem
            setup_logging(None).warning(
                f"auto_resume=True: {readable(str(folder.path))} does not count as finished: {why}"
            )
            return None
        known = {"name": single.name, "env": single.env, "map_name": single.map_name, "exit_state": "completed"}
        return {**known, **read_entry(folder.summary_json), "seed": single.seed, "folder": str(folder.path)}
