"""`omagd study FILE.yaml`: run a study, or show how far it is."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from omagd.run.signals import Stopped, stoppable
from omagd.utils.errors import Mistakes, UserError, print_out, print_warning, readable


def add_common(parser: argparse.ArgumentParser, kind: str, page: str) -> None:
    """Add what `study` and `sweep` (`kind`) share. page: that describes the file."""
    parser.usage = f"omagd {kind} FILE.yaml [options]  |  omagd {kind} status FOLDER"
    parser.epilog = f"{page} describes the file. The same command continues a {kind} that was interrupted."
    parser.add_argument("words", nargs="*", metavar="FILE.yaml", help=f"{kind} file; or `status` and a {kind}'s folder")
    parser.add_argument("--executor", help="where the runs go: local, slurm (default: the first one in the file)")
    parser.add_argument("--results", metavar="DIR", help=f"folder around the {kind}'s folder (default: results)")


def only_word(words: Sequence[str], kind: str) -> str:
    """Return the file of a study or sweep (`kind`), or the folder after `status`. Errors: UserError for more words."""
    if len(words) != 1:
        raise UserError(
            f"{kind}: name one {kind} file, as in: omagd {kind} my_{kind}.yaml, or: omagd {kind} status FOLDER"
        )
    return words[0]


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `study`."""
    add_common(parser, "study", "docs/studies.md")
    parser.add_argument("--examine", action="store_true", help=argparse.SUPPRESS)


def main(options: argparse.Namespace) -> int:
    """Run the command; return 1 if a run has failed."""
    if options.examine:
        asked = json.load(sys.stdin)
        print_out(json.dumps(_examine(asked["jobs"], asked["local"])) + "\n")
        return 0
    if options.words[:1] == ["status"]:
        return _status(options.words[1:])
    file = only_word(options.words, "study")
    from omagd.lab.studies.spec import load
    from omagd.lab.studies.study import outcome, run_study
    from omagd.lab.studies.view import study_table

    study = load(file, results=options.results, executor=options.executor)
    with stoppable(), continued(study.folder, "study", options):
        state = run_study(study, print_warning)
    complete, _ = outcome(state, study)
    print_out(f"{study_table(state)}\n{study.folder}\n")
    return 0 if complete else 1


@contextmanager
def continued(folder: Path, kind: str, options: argparse.Namespace) -> Iterator[None]:
    """Add to a `Stopped` how far a `kind` of runs is, and the command that continues it."""
    try:
        yield
    except Stopped as stop:
        from omagd.lab.studies.state import STATE, StudyState
        from omagd.lab.studies.view import state_line

        begun = (folder / STATE).exists()
        left = state_line(StudyState.read(folder)) if begun else "nothing was started"
        given = [f"--{name}={value}" for name in ("executor", "results") if (value := getattr(options, name))]
        command = shlex.join(["omagd", kind, *options.words, *given])
        stop.where = readable(f": {left} in {folder}. Continue with: {command}")
        raise


def _status(words: Sequence[str]) -> int:
    from omagd.lab.studies.state import StudyState
    from omagd.lab.studies.view import state_line, study_table

    state = StudyState.read(Path(os.path.expanduser(only_word(words, "study"))))
    who = state.leader()  # before the table: it says which runs still go on
    print_out(f"{study_table(state)}\n{state_line(state)}; {who}\n")
    return 0


def _examine(jobs: Sequence[Sequence[str]], local: bool) -> list[dict[str, Any]]:
    """Return identity and card of each run, or the error that it would end with. Seeds share their check."""
    checked = set[tuple[str, ...]]()
    found = []
    for words in jobs:
        but_seed = tuple(word for word in words if not word.startswith("seed="))
        found.append(_examined(words, local, but_seed in checked))
        checked.add(but_seed)
    return found


def _examined(words: Sequence[str], local: bool, checked: bool) -> dict[str, Any]:
    from omagd.run.checkpoint.resuming import identity_of
    from omagd.run.cli.main import config_from
    from omagd.run.cli.preflight import preflight
    from omagd.run.launchers import make_plan
    from omagd.run.reporting.card import make_card

    mistakes = Mistakes()
    try:
        config = there = config_from(words, mistakes)
        if not local:  # this machine may lack the devices of those that run it
            elsewhere = {"use_cuda": False, "dist_backend": None, "precision": "float32", "acting_precision": "float32"}
            there = config.model_copy(update=elsewhere)
        if not checked or mistakes:
            preflight(there, mistakes)
        plan = make_plan(there)
        card = make_card(config, plan.world_size, plan.device(0))
        return {"identity": identity_of(config.model_copy(update={"torch_threads": 1})), "card": card}
    except UserError as error:
        return {"errors": error.messages}
