"""What of a tracker's predictions wins battles: where units are, or who is dead? Nothing is trained.

    python benchmarks/belief_parts.py RUN [--ridge RUN2] [--team RUN3] [--into FOLDER] [--episodes 512]

RUN: of `omagd_tracker`. RUN2: of `fog_ridge` on the same map. RUN3: of `fog_full_obs`, with which the swap test is
played, too. The plug-in test, and the swap test (docs/beliefs.md), are played once with each of these:

    ridge                 linear regression, which takes no unit for dead
    omagd, no deaths      RUN's predictor, but no unit is taken for dead
    omagd, linear means   who is dead as RUN's predictor says, the others as its linear part says
    omagd                 RUN's predictor as it is

Prints a table for each test: win rates on the same battles, and the share of the difference between what agents see and
everything. Adds a line for each to `beliefs.jsonl` in FOLDER (default: RUN).
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
from collections.abc import Callable
from contextlib import chdir
from itertools import product
from pathlib import Path
from typing import Any

from torch import Tensor

from omagd.run.analysis.belief_tests import FILE, LOWER, NAMES, UPPER
from omagd.run.checkpoint.weights import PREDICTOR_FILE, keep_file, load_file
from omagd.run.cli.main import main as omagd
from omagd.utils.run_folder import RunFolder


def no_deaths(weights: dict[str, Tensor]) -> None:
    """Take no unit for dead: no probability is above 1."""
    weights["threshold"].fill_(2.0)


def linear_means(weights: dict[str, Tensor]) -> None:
    """Add the linear part to what was last seen, and nothing of the network's."""
    linear, learned = weights["gain"]
    linear.fill_(1.0)
    learned.zero_()


PARTS: dict[str, Callable[[dict[str, Tensor]], None] | None] = {
    "omagd, no deaths": no_deaths, "omagd, linear means": linear_means, "omagd": None,
}  # fmt: skip


def changed_copy(run: Path, folder: Path, change: Callable[[dict[str, Tensor]], None] | None) -> None:
    """Copy a run whose newest predictor is changed."""
    shutil.copytree(run, folder)
    if change is not None:
        made = RunFolder(folder)
        path = made.step(max(made.saved_steps(), default=0)) / PREDICTOR_FILE  # of the last refresh
        path = path if path.is_file() else made.pretrained("stage2", best=True) / PREDICTOR_FILE
        content = load_file(path, "RUN")
        change(content["weights"])
        keep_file(path, content)


def main() -> None:
    """Play all tests and print a table for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--ridge", type=Path)
    parser.add_argument("--team", type=Path)
    parser.add_argument("--into", type=Path)
    parser.add_argument("--episodes", type=int, default=512)
    arguments = parser.parse_args()
    run, into = arguments.run.resolve(), (arguments.into or arguments.run).resolve()
    config = json.loads((run / "config.json").read_text(encoding="utf-8"))
    where = ["with", f"env_args.map_name={config['env_args']['map_name']}"]
    tests: list[tuple[str, list[str], list[str]]] = [("plug-in", [f"--env-config={config['env']}"], where)]
    tests += [("swap", [str(arguments.team.resolve())], [])] if arguments.team else []
    sources = {"ridge": (arguments.ridge, None)} if arguments.ridge else {}
    sources |= {name: (run, change) for name, change in PARTS.items()}
    with tempfile.TemporaryDirectory() as scratch:
        for name, (source, change) in sources.items():
            changed_copy(source.resolve(), Path(scratch) / name, change)
        with chdir(scratch):  # the name of a folder is the name of its predictor
            for (test, before, after), name in product(tests, sources):
                options = ["--reconstruction", name, "--into", str(into), f"--episodes={arguments.episodes}"]
                if code := omagd(["beliefs", test, *before, *options, *after]):
                    raise SystemExit(code)
    lines: list[dict[str, Any]] = [json.loads(line) for line in (into / FILE).read_text(encoding="utf-8").splitlines()]
    for test, _, _ in tests:
        last = {str(line.get("reconstruction")): line["beliefs"] for line in lines if line["test"] == test}
        rows = {NAMES[LOWER]: last["omagd"][LOWER], **{name: last[name]["reconstruction"] for name in sources}}
        rows[NAMES[UPPER]] = last["omagd"][UPPER]
        print(f"\n{test}, {arguments.episodes} battles\n\n| agents read | win rate | share |\n| --- | --- | --- |")
        for name, entry in rows.items():
            share = "-" if entry["share"] is None else f"{entry['share']:.2f}"
            print(f"| {name} | {entry['win_rate']:.3f} | {share} |")


if __name__ == "__main__":
    main()
