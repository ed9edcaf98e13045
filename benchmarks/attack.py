"""Hundreds of random faults, each on a fresh run: damaged files, kills, full disks, numbers that are not finite, links.

    python benchmarks/attack.py [--faults 500] [--seed 1] [--jobs 2] [--only damage link] [--rows FILE]

After each fault the same command is typed again. What must hold: nothing intact is lost, nothing outside the run's
folder is written, no traceback is printed, no process or temporary file is left; a run that continues exactly ends with
the bits of a run that nothing has disturbed. As root the full disks are small tmpfs mounts, otherwise limits on the
size of files.
Exit code 1 where anything is wrong; the folders of those trials stay in --keep.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from attack_harness import KINDS, VARIANTS, Attack, Result  # noqa: E402

PART = 10
"""Faults that one process makes in a row."""


def faults_of(kinds: list[tuple[str, int]], seed: int, place: str, alone: str) -> list[Result]:
    """Make some faults in this process, one after another."""
    attack = Attack(Path(place), Path(alone))
    return [attack.fault(kind, number, seed) for kind, number in kinds]


def make_alone(place: str) -> None:
    """Make the runs that nothing disturbs."""
    attack = Attack(Path(place))
    for variant in VARIANTS:
        attack.alone(variant)


def main() -> None:
    """Attack, print a table; end with 1 where something is not as it must be."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=500, help="in all, of all kinds alike")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=2, help="processes that attack side by side")
    parser.add_argument("--only", nargs="+", default=list(KINDS), choices=list(KINDS))
    parser.add_argument(
        "--keep", type=Path, help="work in this folder and leave the trials there in which something is wrong"
    )
    parser.add_argument("--rows", type=Path, help="write a JSON object for each kind here")
    asked = parser.parse_args()
    every = [(asked.only[n % len(asked.only)], n // len(asked.only)) for n in range(asked.faults)]
    found: list[Result] = []
    with tempfile.TemporaryDirectory(prefix="attack_") as temporary, ProcessPoolExecutor(asked.jobs) as pool:
        root = (asked.keep or Path(temporary)).resolve()
        parts = [every[start : start + PART] for start in range(0, len(every), PART)]
        alone = str(root / "alone")
        if len(parts) > 1:  # the processes share these, and must not make them side by side
            pool.submit(make_alone, alone).result()
        jobs = [
            pool.submit(faults_of, part, asked.seed, str(root / f"part_{n}"), alone) for n, part in enumerate(parts)
        ]
        for job in as_completed(jobs):
            for result in job.result():
                found.append(result)
                if result.wrong:
                    sys.stdout.write(
                        f"{result.kind} {result.number} ({result.fault}; exit codes {result.codes}): {result.wrong}\n"
                    )
            failed = sum(bool(result.wrong) for result in found)
            sys.stdout.write(f"[{time.strftime('%H:%M:%S')}] {len(found)} of {len(every)}, wrong: {failed}\n")
            sys.stdout.flush()
    rows = [row(kind, [result for result in found if result.kind == kind]) for kind in asked.only]
    for line in rows:
        sys.stdout.write(json.dumps(line) + "\n")
    if asked.rows:
        asked.rows.write_text("".join(json.dumps(line) + "\n" for line in rows))
    sys.exit(1 if any(result.wrong for result in found) else 0)


def row(kind: str, results: list[Result]) -> dict[str, object]:
    """Return the figures of one kind of fault."""
    first = [result.codes[0] for result in results if result.codes]
    return {
        "kind": kind,
        "faults": len(results),
        "wrong": [asdict(result) for result in results if result.wrong],
        "first_exit_codes": {str(code): first.count(code) for code in sorted(set(first))},
        "starts": sum(len(result.codes) for result in results),
        "seconds_median": round(statistics.median(result.seconds for result in results), 2) if results else 0.0,
    }


if __name__ == "__main__":
    main()
