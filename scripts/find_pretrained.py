#!/usr/bin/env python3
"""Find the newest tokenizer and mask predictor that fit a configuration: find_pretrained.py RESULTS [options] with ...

Looked through are the finished pre-trainings of the runs in RESULTS. Both must have been trained on this environment
and map, with these sizes, and the predictor with the tokenizer. What is already given (`pretrained_tokenizer_path=…`)
stays. Prints the two paths, one on each line. Exit code 2 where there are none, with one line that names the
configuration with which those found were made, or how their sizes differ.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from omagd.config.env_info import EnvInfo
from omagd.config.loading import config_names
from omagd.config.schema import Config
from omagd.run.checkpoint.weights import PREDICTOR_FILE, TOKENIZER_FILE, run_folder_of
from omagd.run.cli.main import config_from
from omagd.run.run_folder import RunFolder, Untrusted, read_entry, require_own
from omagd.utils.errors import USER_ERROR_EXIT_CODE, UserError

KINDS = {
    "pretrained_tokenizer_path": ("stage1", TOKENIZER_FILE),
    "pretrained_mask_predictor_path": ("stage2", PREDICTOR_FILE),
}


def candidates(results: Path, key: str) -> list[Path]:
    """Return the files of finished pre-trainings in `results`, newest first, of folders that can be trusted."""
    stage, name = KINDS[key]
    found = []
    for folder in results.iterdir() if results.is_dir() else ():
        file = RunFolder(folder).pretrained(stage, best=True) / name
        with suppress(OSError, Untrusted):
            require_own(folder)  # the user's own, without links
            found.append((file.lstat().st_mtime_ns, file))
    return [file for _, file in sorted(found, reverse=True)]


def fitting_pair(config: Config, info: EnvInfo, results: Path) -> tuple[tuple[Path, Path] | None, list[str]]:
    """Return a tokenizer and the newest predictor that fits it and the configuration, or None.

    The second value says for the newest tokenizer and for the newest predictor why they were not used.
    """
    import torch

    from omagd.run.training.build import load_pretrained

    reasons: dict[str, str] = {}

    def loads(*chosen: Path | None) -> bool:
        given = {key: str(path) for key, path in zip(KINDS, chosen, strict=True) if path is not None}
        try:
            load_pretrained(config.model_copy(update=given), info, torch.device("cpu"))
        except UserError as problem:
            reasons.setdefault(list(given)[-1], problem.message)
            return False
        return True

    given = [getattr(config, key) for key in KINDS]
    tokenizers, predictors = (
        [Path(path)] if path else candidates(results, key) for key, path in zip(KINDS, given, strict=True)
    )
    fitting = [file for file in tokenizers if loads(file, None)]
    if not fitting and predictors:  # so that what differs is said of both at once
        loads(None, predictors[0])
    for predictor in predictors if fitting else ():
        for tokenizer in fitting:
            if loads(tokenizer, predictor):
                return (tokenizer, predictor), []
    return None, list(reasons.values())


def presets(results: Path) -> list[str]:
    """Return the known configurations with which the pre-trainings in `results` were made, the newest first."""
    known = config_names("algs")
    runs = [run_folder_of(file.parent) for key in KINDS for file in candidates(results, key)]
    names = [read_entry(RunFolder(run).config_json).get("name") for run in runs]
    return [name for name in dict.fromkeys(names) if name in known]


def _fits_with(name: str, words: Sequence[str], info: EnvInfo, results: Path) -> bool:
    """Return whether the command `words` finds a pair with `--config=name`."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--config")
    _, others = parser.parse_known_args(words)  # else a second one would be warned of
    try:
        return fitting_pair(config_from([f"--config={name}", *others]), info, results)[0] is not None
    except UserError:
        return False


def newest_pair(words: Sequence[str], results: Path) -> tuple[Path, Path]:
    """Return the newest tokenizer and predictor for the command `words`. Errors: UserError where there are none."""
    from omagd.run.cli.preflight import describe_env

    config = config_from(words)
    info = describe_env(config)
    pair, reasons = fitting_pair(config, info, results)
    if pair is not None:
        return pair
    what = f"{info.name} {info.map_name}".strip()
    where = shlex.quote(str(results))
    missing = f"no tokenizer and mask predictor for {what} with the sizes of {config.name} in {where}"
    for name in presets(results):
        if _fits_with(name, words, info, results):
            made = f"those found were made with --config {name}"
            raise UserError(f"{missing}: {made}. Type CONFIG={name} ./run_gnn_stage3_ddp.sh")
    fix = (
        "run run_pretrain_ddp.sh (STAGE=stage1, then STAGE=stage2), or give TOKENIZER_PATH=… and MASK_PREDICTOR_PATH=…"
    )
    raise UserError("; ".join([f"{missing}: {fix}", *(f"not used: {reason}" for reason in reasons)]))


def main(results: str, *words: str) -> int:
    """Print the newest fitting pair."""
    try:
        tokenizer, predictor = newest_pair(words, Path(results).expanduser())
    except UserError as error:
        sys.stderr.write(error.render() + "\n")
        return USER_ERROR_EXIT_CODE
    sys.stdout.write(f"{tokenizer}\n{predictor}\n")
    for name, path in (("tokenizer", tokenizer), ("mask predictor", predictor)):
        sys.stderr.write(f"{name}: {shlex.quote(str(path))}\n")
    return 0


if __name__ == "__main__":
    if len(sys.argv) < 2 or sys.argv[1].startswith("-"):
        asked = sys.argv[1:2] in (["-h"], ["--help"])
        (sys.stdout if asked else sys.stderr).write(__doc__)
        sys.exit(0 if asked else USER_ERROR_EXIT_CODE)
    sys.exit(main(*sys.argv[1:]))
