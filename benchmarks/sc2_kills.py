"""Games and environment workers killed at random moments of a training run with several ranks, on the stand-in.

    python benchmarks/sc2_kills.py [--kills 200] [--workers 20] [--every 0.6] [--ranks 2] [--slots 2] [key=value ...]

QMIX trains on 3m by `run=ddp` as users type it, while games, and workers among them, are killed by SIGKILL. After the
last kill the run plays on until it has learned a little more, is asked to end, and what is left of it is looked for:
processes, shared memory, temporary files. Open files and resident memory of the ranks are those of the first and of the
last tenth of the kills. Needs no StarCraft II. Exit code 1 where something was lost, left behind or not counted.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

import sc2_stand_in  # noqa: E402
from command_harness import children, left_behind  # noqa: E402

WORDS = (
    "env_args.map_name=3m", "run=ddp", "t_max=100000000", "batch_size=8", "buffer_size=200", "test_interval=3000",
    "test_nepisode=4", "log_interval=200", "runner_log_interval=200", "learner_log_interval=200", "save_model=False",
    "use_tensorboard=False", "use_cuda=False",
)  # fmt: skip
PATIENCE = 120.0


@dataclass
class Seen:
    """What was done and seen: kills, and of the ranks open files and resident MB after each."""

    games: int = 0
    workers: int = 0
    files: list[float] = field(default_factory=list)
    memory: list[float] = field(default_factory=list)
    seconds: float = 0.0


def last_record(results: Path) -> dict[str, Any]:
    """Return the last record of the only run, empty before there is one."""
    for path in results.glob("*/metrics.jsonl"):
        lines = path.read_text().splitlines()
        return dict(json.loads(lines[-1])) if lines else {}
    return {}


def wait_until(process: subprocess.Popen[bytes], true: Callable[[], bool], what: str) -> None:
    """Wait for something in a running command."""
    deadline = time.monotonic() + PATIENCE
    while not true():
        if process.poll() is not None or time.monotonic() > deadline:
            raise SystemExit(f"exit code {process.poll()} while waiting for {what}")
        time.sleep(0.1)


def parent_of(pid: int) -> int:
    """Return the parent of a process. Errors: OSError where it is gone."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def measure(ranks: list[int], seen: Seen) -> None:
    """Note open files and resident memory of the ranks."""
    seen.files.append(statistics.mean(len(os.listdir(f"/proc/{pid}/fd")) for pid in ranks))
    pages = [int(Path(f"/proc/{pid}/statm").read_text().split()[1]) for pid in ranks]
    seen.memory.append(statistics.mean(pages) * os.sysconf("SC_PAGE_SIZE") / 1e6)


def kill_at_random(process: subprocess.Popen[bytes], game: Path, asked: argparse.Namespace) -> Seen:
    """Kill games and workers of a running command."""
    chance, seen, ranks = random.Random(asked.seed), Seen(), children(process.pid)
    kinds = ["worker"] * asked.workers + ["game"] * (asked.kills - asked.workers)
    chance.shuffle(kinds)
    start = time.monotonic()
    while kinds:
        time.sleep(chance.expovariate(1 / asked.every))
        if process.poll() is not None:
            break
        try:
            victim = chance.choice(sc2_stand_in.running(game) or [-1])
            if victim > 0 and kinds[-1] == "worker":
                victim = parent_of(victim)
            if victim <= 1 or victim in ranks or victim == process.pid:
                continue
            os.kill(victim, signal.SIGKILL)
        except OSError:
            continue  # it is gone already
        if kinds.pop() == "worker":
            seen.workers += 1
        else:
            seen.games += 1
        measure(ranks, seen)
    seen.seconds = time.monotonic() - start
    return seen


def run(place: Path, asked: argparse.Namespace, words: list[str]) -> dict[str, Any]:
    """Run it all in the folder `place` and return the figures."""
    game, temporary, said = sc2_stand_in.install(place / "StarCraftII"), place / "tmp", place / "said"
    temporary.mkdir()
    variables = {"SC2PATH": str(game), "TMPDIR": str(temporary), "SC2_STAND_IN_STAY": "1", "OMP_NUM_THREADS": "1"}
    variables["TORCHINDUCTOR_CACHE_DIR"] = str(place / "torch")  # torch keeps it, whoever runs
    more = [f"world_size={asked.ranks}", f"batch_size_run={asked.slots}", f"local_results_path={place}/results"]
    command = [sys.executable, str(ROOT / "src" / "main.py"), "--config=qmix", "--env-config=sc2", "with"]
    shared = set(os.listdir("/dev/shm"))
    with said.open("wb") as output:
        process = subprocess.Popen(
            [*command, *WORDS, *more, *words], cwd=place, env={**os.environ, **variables}, stdin=subprocess.DEVNULL,
            stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
    try:
        wait_until(process, lambda: last_record(place / "results").get("updates", 0) > 0, "the first update")
        before = last_record(place / "results")
        seen = kill_at_random(process, game, asked)
        killed = last_record(place / "results")
        wait_until(
            process, lambda: last_record(place / "results").get("updates", 0) > killed["updates"] + 20, "more updates"
        )
        after = last_record(place / "results")
        process.terminate()
        code = process.wait(60)
    finally:
        if process.poll() is None:
            process.kill()
        sys.stderr.write(said.read_text(errors="replace")[-2000:] if process.returncode != 143 else "")
    left = left_behind(process.pid, 10) + [f"game {pid}" for pid in sc2_stand_in.running(game)]
    files = [str(path) for path in temporary.rglob("*") if path.is_dir() and not path.name.startswith("omagd-sc2-")]
    text = said.read_text(errors="replace")
    tenth = max(len(seen.files) // 10, 1)
    return {
        "kills of games": seen.games,
        "kills of workers": seen.workers,
        "seconds of killing": round(seen.seconds, 1),
        "exit code (143: as asked)": code,
        "episodes lost, as counted": int(after.get("lost_episodes", 0)),
        "games restarted, as counted": int(after.get("restarts", 0)),
        "workers restarted, as counted": int(after.get("worker_restarts", 0)),
        "deaths of games that the log tells": text.count("StarCraft II was lost"),
        "starts of games that failed, and were tried again": text.count("StarCraft II did not start (attempt"),
        "episodes learned from, meanwhile": int(after["episode"] - before["episode"]),
        "updates meanwhile": int(after["updates"] - before["updates"]),
        "environment steps meanwhile": int(after["t_env"] - before["t_env"]),
        "open files of a rank, first and last tenth": spread(seen.files, tenth),
        "resident MB of a rank, first and last tenth": spread(seen.memory, tenth),
        "processes left": len(left),
        "names left in /dev/shm": len(set(os.listdir("/dev/shm")) - shared),
        "temporary folders left": len(files),
    }


def spread(values: list[float], tenth: int) -> str:
    """Return the medians of the first and of the last values."""
    return f"{statistics.median(values[:tenth]):.0f} -> {statistics.median(values[-tenth:]):.0f}"


def main() -> None:
    """Print the table; end with 1 where a figure is not what it must be."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200, help="in all")
    parser.add_argument("--workers", type=int, default=20, help="how many of them hit workers")
    parser.add_argument("--every", type=float, default=0.6, help="mean seconds between two")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--slots", type=int, default=2, help="of a rank")
    parser.add_argument("--seed", type=int, default=1)
    asked, words = parser.parse_known_args()
    with tempfile.TemporaryDirectory(prefix="sc2_kills_") as folder:
        figures = run(Path(folder), asked, words)
    width = max(map(len, figures))
    for name, value in figures.items():
        sys.stdout.write(f"| {name:<{width}} | {value} |\n")
    fine = figures["kills of games"] + figures["kills of workers"] == asked.kills
    fine &= figures["exit code (143: as asked)"] == 143
    fine &= figures["workers restarted, as counted"] == figures["kills of workers"]
    fine &= not any(value for name, value in figures.items() if "left" in name)
    sys.exit(0 if fine else 1)


if __name__ == "__main__":
    main()
