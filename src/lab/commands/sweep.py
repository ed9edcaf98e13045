"""`omagd sweep FILE.yaml`: search the space of a sweep file, or show how far a sweep is."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

from omagd.lab.commands.study import add_common, continued, only_word
from omagd.run.signals import stoppable
from omagd.utils.errors import UserError, print_out, print_warning


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `sweep`."""
    add_common(parser, "sweep", "docs/sweeps.md")


def main(options: argparse.Namespace) -> int:
    """Run the command; return 1 if no trial has a result."""
    if options.words[:1] == ["status"]:
        return _status(options.words[1:])
    file = only_word(options.words, "sweep")
    from omagd.lab.studies.sweep import markdown, run_sweep
    from omagd.lab.studies.sweep_spec import load_sweep

    sweep = load_sweep(file, results=options.results, executor=options.executor)
    with stoppable(), continued(sweep.folder, "sweep", options):
        found = run_sweep(sweep, print_warning)
    print_out(f"{markdown(sweep, found)}\n{sweep.folder}\n")
    return 0 if found["best"] is not None else 1


def _status(words: Sequence[str]) -> int:
    from omagd.lab.studies.state import StudyState
    from omagd.lab.studies.view import state_line

    folder = Path(os.path.expanduser(only_word(words, "sweep")))
    try:
        table = (folder / "trials.md").read_text(encoding="utf-8")
    except (OSError, ValueError):
        raise UserError(f"{folder}: holds no sweep, or none that has begun a trial (trials.md is missing)") from None
    state = StudyState.read(folder)
    who = state.leader()  # before the table: it says which runs still go on
    print_out(f"{table}\nruns: {state_line(state)}; {who}\n")
    return 0
