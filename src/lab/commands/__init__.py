"""The commands of this package, as `omagd.run.cli.REGISTRY` names them."""

from __future__ import annotations

from omagd.run.cli import Command

DOCTOR = Command(
    "doctor",
    "check this machine and print fixes; --env-config=NAME: for that environment",
    "omagd.lab.commands.doctor",
)
PLOT = Command(
    "plot RUN ...", "figures of several runs or a study: curves with bands, last tests", "omagd.lab.analysis.plot"
)
COMPARE = Command(
    "compare RUN ...",
    "print the results of several runs or a study in a table; marks runs that cannot be compared",
    "omagd.lab.analysis.comparison",
)
REPORT = Command("report [RUN ...]", "one HTML page about a run, several runs or a study", "omagd.lab.analysis.report")
BELIEFS = Command(
    "beliefs ...",
    "how far off a run's reconstruction of unseen units is (--reconstruction RUN)",
    "omagd.lab.commands.beliefs",
)
STUDY = Command("study FILE.yaml", "run arms x environments x seeds; `study status FOLDER`", "omagd.lab.commands.study")
SWEEP = Command(
    "sweep FILE.yaml", "search the best keys with Optuna; `sweep status FOLDER`", "omagd.lab.commands.sweep"
)
CLEAN = Command(
    "clean FOLDER ...", "free what finished runs no longer need (--dry-run shows it)", "omagd.lab.commands.clean"
)
WATCH = Command(
    "watch [RUN] [key=value ...]",
    "play a trained run, or a recording, as an HTML page or a GIF (--format=...)",
    "omagd.lab.commands.watch",
)
WEIGHTS = Command(
    "weights list|get|pack|onnx",
    "published policies: list, get, make them; export to ONNX",
    "omagd.lab.commands.weights",
)
