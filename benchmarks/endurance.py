"""Days of iterations in minutes: whether any process of a run grows, in memory, open files or threads.

    python benchmarks/endurance.py [--minutes 5] [--iterations N] [--env matrix_game] [--workers] [key=value ...]

A run with two ranks as users type it, on battles so short and networks so small that an iteration costs milliseconds;
everything else is as in a long run, only more often: tests, logs, weights and checkpoints are due again and again, the
replay buffer is full after the first iterations. `--iterations` is what the default run (`python src/main.py`) does in
24 hours: `--measure` says how many those are here. What is compared are medians: of the first tenth after the warm-up
with the last tenth, for each process: resident memory, and of that the heap (what is no file's). Exit code 1 where
resident memory grew by more than 2 %, or there are more open files or threads than before.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from runs import MAIN, play, records

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from chaos_harness import family  # noqa: E402

DAY = 24 * 3600.0
RANKS, SLOTS = 2, 2
ALLOWED = 0.02
GRACE_SECONDS = 30.0
# Iterations between what else a run does; the default run tests and logs each 80 iterations or so, and saves rarely.
TEST, LOG, SAVE = 80, 80, 4000
TINY = (
    "run=ddp", f"world_size={RANKS}", "use_cuda=False", f"batch_size_run={SLOTS}", "batch_size=4", "buffer_size=8",
    "updates_per_iteration=1", "rnn_hidden_dim=8", "mixing_embed_dim=4", "hypernet_embed=4", "test_nepisode=4",
    "checkpoint_interval=1", "log_memory_usage=True",
)  # fmt: skip
GRAPHS = (
    "graph_pretrain_epochs=2", "graph_pretrain_episodes=8", "graph_pretrain_batch_size=4", "tokenizer_config.n_codes=8",
    "graph_pretrain_eval_episodes=4", "graph_pretrain_test_episodes=4",
    "tokenizer_config.code_dim=4", "tokenizer_config.hidden_dim=8",
    "mask_predictor_config.d_model=8", "mask_predictor_config.n_heads=2", "mask_predictor_config.feedforward_dim=8",
)  # fmt: skip


@dataclass
class Watched:
    """One process: what it is, and its samples (seconds, resident MB, heap MB, open files, threads)."""

    role: str
    samples: list[tuple[float, float, float, int, int]] = field(default_factory=list)


def look(pid: int, seconds: float) -> tuple[float, float, float, int, int] | None:
    """Return a sample of a process; None where it has gone."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
        sizes = {line.split(":")[0]: int(line.split()[1]) / 1024 for line in lines}
        threads = len(os.listdir(f"/proc/{pid}/task"))
        return seconds, sizes["Rss"], sizes["Anonymous"], len(os.listdir(f"/proc/{pid}/fd")), threads
    except (OSError, IndexError, KeyError, ValueError):
        return None


def start(place: Path, asked: argparse.Namespace, words: list[str]) -> subprocess.Popen[bytes]:
    """Start the run in a session of its own."""
    graphs = asked.env == "skirmish"
    each = (4 if asked.env == "matrix_game" else 8) if not graphs else 100  # steps of an iteration, about
    due = [f"test_interval={TEST * each}", f"save_model_interval={SAVE * each}", f"t_max={10**11}"]
    due += [f"{name}={LOG * each}" for name in ("log_interval", "runner_log_interval", "learner_log_interval")]
    command = [
        sys.executable,
        str(MAIN),
        f"--config={'omagd_small' if graphs else 'qmix'}",
        f"--env-config={asked.env}",
    ]
    more = [*(GRAPHS if graphs else ()), *(["env_processes=True"] if asked.workers else []), *words]
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(place)}
    with (place / "said").open("wb") as said:
        return subprocess.Popen(
            [*command, "with", *TINY, *due, f"local_results_path={place}/results", *more],
            cwd=place, env=variables, stdin=subprocess.DEVNULL, stdout=said, stderr=said, start_new_session=True,
        )  # fmt: skip


def iterations(place: Path) -> int:
    """Return how many iterations of stage 3 the run has logged."""
    for path in place.glob("results/*/metrics.jsonl"):
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - 8192))
            lines = file.read().decode(errors="replace").splitlines()[:-1]
        logged = [json.loads(line)["episode"] for line in lines[1:] if '"episode"' in line]
        return int(logged[-1]) // (RANKS * SLOTS) if logged else 0
    return 0


def watch(place: Path, asked: argparse.Namespace, words: list[str]) -> tuple[dict[int, Watched], int, float]:
    """Run, and sample every process; return what was seen, and iterations and seconds after the warm-up's start."""
    process = start(place, asked, words)
    seen: dict[int, Watched] = {}
    begun, done = time.monotonic(), 0
    try:
        while process.poll() is None:
            time.sleep(asked.every)
            passed, done = time.monotonic() - begun, iterations(place)
            for pid, role in family(process.pid).items():
                if done and (sample := look(pid, passed)):
                    seen.setdefault(pid, Watched(role)).samples.append(sample)
            if passed > 60 * asked.minutes or done >= asked.iterations:
                break
        if process.poll() is not None:
            raise SystemExit(f"exit code {process.returncode}\n{(place / 'said').read_text()[-3000:]}")
        process.send_signal(signal.SIGTERM)
        process.wait(GRACE_SECONDS)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    return seen, done, time.monotonic() - begun


def rows(seen: Iterable[Watched], warm_up: float) -> list[dict[str, Any]]:
    """Return a row for each process that lived through all of it."""
    kept = [watched for watched in seen if len(watched.samples) >= 20]
    longest = max(len(watched.samples) for watched in kept)
    found = []
    for watched in sorted(kept, key=lambda watched: watched.role):
        samples = watched.samples[int(warm_up * len(watched.samples)) :]
        if len(watched.samples) < 0.9 * longest:
            continue
        tenth = max(3, len(samples) // 10)
        first, last = (
            [statistics.median(column) for column in zip(*part, strict=True)]
            for part in (samples[:tenth], samples[-tenth:])
        )
        row: dict[str, Any] = {"process": watched.role, "samples": len(samples)}
        for name, a, b in zip(("resident_mb", "heap_mb", "files", "threads"), first[1:], last[1:], strict=True):
            row[name] = [round(a, 2), round(b, 2)]
        row["growth"] = round(last[1] / first[1] - 1, 5)
        row["fine"] = row["growth"] <= ALLOWED and last[3] <= first[3] and last[4] <= first[4]
        found.append(row)
    return found


def of_a_day(seconds: float) -> dict[str, float]:
    """Return how many iterations the default run does in a day here, from its stage 3 of about `seconds`."""
    with tempfile.TemporaryDirectory() as results:
        words = ["t_max=24000", "graph_pretrain_epochs=2", "graph_pretrain_episodes=64", "log_interval=2000"]
        words += ["runner_log_interval=2000", "learner_log_interval=2000", "test_interval=12000"]
        logged = [row for row in records(play("day", results, "omagd_small", "skirmish", words)) if "updates" in row]
    logged = [row for row in logged if row["updates"] > 0]
    passed = logged[-1]["wall_seconds"] - logged[0]["wall_seconds"]
    done = (logged[-1]["episode"] - logged[0]["episode"]) / 16
    return {"seconds of an iteration": round(passed / done, 4), "iterations of 24 hours": round(done / passed * DAY)}


def main() -> None:
    """Print a line for each process; end with 1 where one grew."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=1e9, help="end then, whatever has been done")
    parser.add_argument("--iterations", type=int, default=160_000, help="those of 24 hours, see --measure")
    parser.add_argument("--env", default="matrix_game", choices=["matrix_game", "memory_game", "skirmish"])
    parser.add_argument("--workers", action="store_true", help="environments in processes")
    parser.add_argument("--every", type=float, default=1.0, help="seconds between samples")
    parser.add_argument("--warm-up", type=float, default=0.2, help="share of the samples that do not count")
    parser.add_argument(
        "--measure", action="store_true", help="say how many iterations the default run does in 24 hours"
    )
    parser.add_argument("--rows", type=Path, help="append the figures to this file")
    asked, words = parser.parse_known_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what is running is ended too
    if asked.measure:
        sys.stdout.write(json.dumps(of_a_day(30.0)) + "\n")
        return
    with tempfile.TemporaryDirectory(prefix="endurance_") as folder:
        seen, done, seconds = watch(Path(folder), asked, words)
    found = rows(seen.values(), asked.warm_up)
    facts = {"env": asked.env, "iterations": done, "seconds": round(seconds), "ranks": RANKS, "workers": asked.workers}
    lines = [json.dumps({**facts, **row}) for row in found]
    sys.stdout.write("\n".join([f"{done} iterations in {seconds:.0f} s", *lines]) + "\n")
    if asked.rows:
        with asked.rows.open("a") as file:
            file.write("\n".join(lines) + "\n")
    sys.exit(0 if found and all(row["fine"] for row in found) else 1)


if __name__ == "__main__":
    main()
