"""Python interface (docs/python_api.md): `study` of `omagd`."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from omagd.lab.studies.spec import load
from omagd.lab.studies.study import outcome, run_study
from omagd.run.launchers import require_one_task
from omagd.utils.signals import stoppable


def study(
    spec: str | Path | Mapping[str, Any], *, results: str | None = None, executor: str | None = None
) -> dict[str, Any]:
    """Run a study, or what is left of it, like `omagd study`; call it in the main thread.

    Args:
        spec: path of a study file, or its values (docs/studies.md). results: folder around the study's folder.
        executor: local, slurm or ray, instead of the first one that the study names.
    Returns: `folder`; `complete`: whether every run has a result; `runs`: a list with `name`, `arm`, `env`, `map`,
        `seed`, `state`, `error` and `folder` of each.
    Errors: UserError for what the study gets wrong, before anything starts. A failed run is no error.
    """
    require_one_task("study")
    found = load(spec, results=results, executor=executor)
    with stoppable():
        complete, runs = outcome(run_study(found, warnings.warn, quiet=not sys.stderr.isatty()), found)
    return {"folder": str(found.folder), "complete": complete, "runs": runs}
