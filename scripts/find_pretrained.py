#!/usr/bin/env python3
"""Find the newest tokenizer and mask predictor that fit a configuration: find_pretrained.py RESULTS [options] with ...

Looked through are the finished pre-trainings of the runs in RESULTS. Both must have been trained on this environment
and map, with these sizes, and the predictor with the tokenizer. What is already given (`pretrained_tokenizer_path=…`)
stays. Prints the two paths, one on each line. Exit code 2, with one line, where there are none.
"""

from __future__ import annotations

import shlex
import sys
from contextlib import suppress
from pathlib import Path

from omagd.config.env_info import EnvInfo
from omagd.config.schema import Config
from omagd.run.command_line import config_from
from omagd.utils.checkpoint import PREDICTOR_FILE, TOKENIZER_FILE
from omagd.utils.errors import USER_ERROR_EXIT_CODE, UserError
from omagd.utils.owned_folder import Untrusted, require_own
from omagd.utils.run_folder import RunFolder

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


def newest_pair(config: Config, info: EnvInfo, results: Path) -> tuple[Path, Path]:
    """Return a tokenizer and the newest predictor that fits it and the configuration. Errors: UserError for none."""
    import torch

    from omagd.run.build import load_products

    def loads(**paths: Path) -> bool:
        given = {key: str(path) for key, path in paths.items()}
        try:
            load_products(config.model_copy(update=given), info, torch.device("cpu"))
        except UserError as problem:
            reasons.append(problem.message)
            return False
        return True

    reasons: list[str] = []
    files = {}
    for key in KINDS:
        given = getattr(config, key)
        files[key] = [Path(given)] if given else candidates(results, key)
    tokenizers = [file for file in files["pretrained_tokenizer_path"] if loads(pretrained_tokenizer_path=file)]
    for predictor in files["pretrained_mask_predictor_path"] if tokenizers else ():
        for tokenizer in tokenizers:
            if loads(pretrained_tokenizer_path=tokenizer, pretrained_mask_predictor_path=predictor):
                return tokenizer, predictor
    what = f"{info.name} {info.map_name}".strip()
    where = shlex.quote(str(results))
    mend = (
        "run run_pretrain_ddp.sh (STAGE=stage1, then STAGE=stage2), or give TOKENIZER_PATH=… and MASK_PREDICTOR_PATH=…"
    )
    missing = f"no tokenizer and mask predictor for {what} with the sizes of {config.name} in {where}: {mend}"
    raise UserError(missing, *(f"not used: {reason}" for reason in reasons[:1]))


def main(results: str, *words: str) -> int:
    """Print the newest fitting pair."""
    from omagd.run.preflight import describe_env

    try:
        config = config_from(words)
        tokenizer, predictor = newest_pair(config, describe_env(config), Path(results).expanduser())
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
