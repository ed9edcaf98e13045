"""The commands of this package, as `omagd.run.cli.REGISTRY` names them."""

from __future__ import annotations

from omagd.run.cli import Command


def _here(usage: str, about: str) -> Command:
    """Return a command whose module is here, under its name."""
    return Command(usage, about, f"{__name__}.{usage.split()[0]}")


DOCTOR = _here("doctor", "check this machine and print fixes; --env-config=NAME: for that environment")
PLOT = Command(
    "plot RUN ...", "figures of several runs or a study: curves with bands, last tests", "omagd.lab.analysis.plot"
)
COMPARE = Command(
    "compare RUN ...",
    "print the results of several runs or a study in a table; marks runs that cannot be compared",
    "omagd.lab.analysis.comparison",
)
REPORT = Command("report [RUN ...]", "one HTML page about a run, several runs or a study", "omagd.lab.analysis.report")
BELIEFS = _here("beliefs ...", "how far off a run's reconstruction of unseen units is (--reconstruction RUN)")
STUDY = _here("study FILE.yaml", "run arms x environments x seeds; `study status FOLDER`")
SWEEP = _here("sweep FILE.yaml", "search the best keys with Optuna; `sweep status FOLDER`")
CLEAN = _here("clean FOLDER ...", "free what finished runs no longer need (--dry-run shows it)")
WATCH = _here(
    "watch [RUN] [key=value ...]", "play a trained run, or a recording, as an HTML page or a GIF (--format=...)"
)
WEIGHTS = _here("weights list|get|pack|onnx", "published policies: list, get, make them; export to ONNX")
