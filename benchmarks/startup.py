"""How long it takes until something happens: `--help`, and the first environment steps of two ranks.

    python benchmarks/startup.py --runs 5

A run says in its log when it has played its first episodes, which is after its first steps; the time is counted from
the moment the command is typed.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from runs import MAIN

TARGETS = {"--help": 0.5, "first steps": 5.0}
SAID = "first episodes played"


def help_seconds() -> float:
    """Return the seconds that `--help` takes."""
    started = time.perf_counter()
    subprocess.run([sys.executable, str(MAIN), "--help"], check=True, capture_output=True)
    return time.perf_counter() - started


def first_steps(words: list[str]) -> float:
    """Return the seconds from launch to the first environment steps, of whatever stage comes first."""
    with tempfile.TemporaryDirectory() as folder:
        given = [*words, f"local_results_path={folder}", "unique_token=run"]
        log = Path(folder) / "run" / "logs" / "rank_0.log"
        started = time.time()
        process = subprocess.Popen(
            [sys.executable, str(MAIN), *given], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
        )
        try:
            while process.poll() is None:
                text = log.read_text() if log.is_file() else ""
                if SAID in text:
                    return time.time() - started
                time.sleep(0.01)
            raise SystemExit(f"the run ended before it played: {process.communicate()[1][-1000:]}")
        finally:
            process.terminate()
            process.communicate()


def main() -> None:
    """Measure and print the medians."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--config", default="qmix")
    parser.add_argument("--env", default="skirmish")
    parser.add_argument("--ranks", type=int, default=2)
    arguments, extra = parser.parse_known_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    words = [f"--config={arguments.config}", f"--env-config={arguments.env}", "-u", "with", "use_cuda=False"]
    words += ["run=ddp", f"world_size={arguments.ranks}", *extra]
    for name, once in (("--help", help_seconds), ("first steps", lambda: first_steps(words))):
        seconds = [once() for _ in range(arguments.runs)]
        line = {"work": f"start: {name}", "seconds": round(statistics.median(seconds), 2), "target": TARGETS[name]}
        line |= {"all": [round(value, 2) for value in seconds]}
        sys.stdout.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
