"""A study that is killed ten times: whether all its results are there and have the bits of one that was left alone.

    python benchmarks/study_chaos.py [--kills 10] [--seeds 5] [--jobs 2] [--rows benchmarks/results/study_chaos.jsonl]

Four methods on three maps of skirmish with five seeds: 60 tiny runs, two at a time, by `omagd study`. One such study is
left alone. Another one is hit by SIGKILL at random moments: the process that leads the study, a run, or a process of a
run's environments; whenever the command has ended it is typed again, until it ends with exit code 0. Then weights,
metrics, episodes and results of every run are compared with those of the first study, and processes that were left are
looked for. It also reports the CPU time of the study's own processes (leading, and checking the jobs) beside that of
the runs. Exit code 1 where a run differs or is missing, a process is left, or that share is more than 3 %.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from chaos_harness import differences, family  # noqa: E402
from command_budgets import BUDGETS  # noqa: E402
from reaper import having  # noqa: E402

KINDS = ("launcher", "run", "worker")
MARK = "OMAGD_STUDY_CHAOS"
MOST_SHARE = 0.03
LEFT_SECONDS = 60.0
MOST_STARTS = 50
LATER_SECONDS = 15.0
SIZES = {"rnn_hidden_dim": 8, "mixing_embed_dim": 4, "hypernet_embed": 4, "checkpoint_interval": 0.0}


@dataclass(frozen=True)
class Moment:
    """When a process of a kind is killed: `later` seconds after `done` runs have ended."""

    done: int
    later: float
    kind: str


@dataclass
class Trial:
    """A study that is started until it is complete.

    Attributes:
        starts: of its command. kills: (kind, seconds after the first start). codes: exit codes of its starts.
    """

    file: Path
    place: Path
    starts: int = 0
    kills: list[tuple[str, float]] = field(default_factory=list)
    codes: list[int] = field(default_factory=list)
    mark: str = field(default_factory=lambda: uuid.uuid4().hex)
    seconds: float = 0.0

    @property
    def folder(self) -> Path:
        """Folder of the study."""
        return self.place / self.file.stem

    def start(self) -> subprocess.Popen[bytes]:
        """Type the command."""
        self.starts += 1
        self.place.mkdir(parents=True, exist_ok=True)
        with (self.place / "output").open("ab") as output:
            return subprocess.Popen(
                [sys.executable, "-m", "omagd", "study", str(self.file), "--results", str(self.place)],
                stdout=output, stderr=output, env={**os.environ, MARK: self.mark}, start_new_session=True,
            )  # fmt: skip

    def run(self, plan: list[Moment], said: Callable[[str], None]) -> None:
        """Run to the end; kill as planned."""
        begun, process = time.monotonic(), self.start()
        reached: dict[Moment, float] = {}
        try:
            while True:
                code = process.poll()
                if code is not None:
                    self.codes.append(code)
                    if code == 0 or self.starts > MOST_STARTS:
                        break
                    process = self.start()
                done, now = self._counts().get("done", 0), time.monotonic() - begun
                for moment in [moment for moment in plan if done >= moment.done]:
                    due = now >= reached.setdefault(moment, now) + moment.later
                    if due and process.poll() is None and self._kill(moment.kind, process):
                        plan.remove(moment)
                        self.kills.append((moment.kind, round(now, 1)))
                        said(f"kill {len(self.kills)} after {now:.0f} s: {moment.kind}; {self._counts()}")
                        break
                time.sleep(0.5)
        finally:
            self.seconds = time.monotonic() - begun
            if process.poll() is None:
                process.kill()

    def _kill(self, kind: str, leader: subprocess.Popen[bytes]) -> bool:
        """Kill a process of this kind; return whether there was one."""
        if kind == "launcher":
            leader.kill()
            return True
        runs = [pid for pid in having(MARK, self.mark) if _parent(pid) == leader.pid and _leads(pid)]
        random.shuffle(runs)
        for run in runs:
            victims = (
                [run] if kind == "run" else [pid for pid, role in family(run).items() if role in {"rank", "worker"}]
            )
            if victims:
                os.kill(random.choice(victims), signal.SIGKILL)
                return True
        return False

    def _counts(self) -> dict[str, int]:
        try:
            jobs = json.loads((self.folder / "study.json").read_text())["jobs"]
        except (OSError, ValueError):
            return {}
        states = [job["state"] for job in jobs]
        return {state: states.count(state) for state in dict.fromkeys(states)}

    def left(self) -> list[str]:
        """Return the processes that are left after a while."""
        until = time.monotonic() + LEFT_SECONDS
        while (found := having(MARK, self.mark)) and time.monotonic() < until:
            time.sleep(0.2)
        return [f"process {pid}" for pid in found]


def _parent(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return -1


def _leads(pid: int) -> bool:
    """Return whether a process leads its session, as runs do."""
    try:
        return os.getsid(pid) == pid
    except ProcessLookupError:
        return False


def study_of(maps: list[str], seeds: int, jobs: int, t_max: int) -> dict[str, object]:
    """Return the values of the study file."""
    small = {key: yaml.safe_load(value) for key, value in (word.split("=", 1) for word in BUDGETS)}
    keys = ("graph_", "tokenizer", "mask_", "eval_", "max_ep", "use_cuda")
    small = {key: value for key, value in small.items() if not key.startswith(keys)}
    return {
        "with": {**small, **SIZES, "t_max": t_max, "use_cuda": False},
        "arms": {
            "qmix": {"config": "qmix"},
            "vdn": {"config": "vdn"},
            "iql": {"config": "iql"},
            "workers": {"config": "qmix", "with": {"env_processes": True}},
        },
        "environments": maps,
        "seeds": seeds,
        "executor": {"local": {"jobs": jobs}},
    }


def main() -> None:
    """Run both studies, compare them, and print one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--maps", nargs="+", default=["3m", "2m_vs_1z", "3s_vs_3z"])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time")
    parser.add_argument("--t-max", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1, help="of the moments and the victims")
    parser.add_argument("--keep", type=Path, help="leave the studies in this folder")
    parser.add_argument("--rows", type=Path, help="append the JSON line to this file")
    asked = parser.parse_args()
    random.seed(asked.seed)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))

    def said(text: str) -> None:
        sys.stdout.write(f"[{time.strftime('%H:%M:%S')}] {text}\n")
        sys.stdout.flush()

    with tempfile.TemporaryDirectory(prefix="study_chaos_") as temporary:
        place = asked.keep or Path(temporary)
        place.mkdir(parents=True, exist_ok=True)
        file = place / "toy.yaml"
        file.write_text(yaml.safe_dump(study_of(asked.maps, asked.seeds, asked.jobs, asked.t_max)))
        total = 4 * len(asked.maps) * asked.seeds
        kinds = [KINDS[number % len(KINDS)] for number in range(asked.kills)]
        moments = [Moment(random.randrange(total), random.uniform(0.0, LATER_SECONDS), kind) for kind in kinds]
        killed, alone = Trial(file, place / "killed"), Trial(file, place / "alone")
        killed.run(moments, said)
        left = killed.left()
        said(f"killed {len(killed.kills)} times: {killed.seconds:.0f} s, {killed.starts} starts {killed.codes}; {left}")
        alone.run([], said)
        left += alone.left()
        about = json.loads((alone.folder / "study.json").read_text())
        jobs, cpu = about["jobs"], about["cpu_seconds"]
        share = (cpu["engine"] + cpu["checks"]) / cpu["runs"]
        said(f"left alone: {len(jobs)} runs in {alone.seconds:.0f} s; CPU seconds {cpu}: {share:.2%}")
        names = [job["job"]["name"] for job in jobs]
        wrong = []
        for name in names:
            try:
                found = differences(alone.folder / "runs" / name, killed.folder / "runs" / name)
            except (OSError, ValueError, KeyError) as error:
                found = [f"{type(error).__name__}: {error}"]
            wrong += [f"{name}: {each}" for each in found]
        fine = not wrong and not left and alone.codes == [0] and killed.codes[-1:] == [0] and share <= MOST_SHARE
        row = {
            "runs": len(names), "kills": len(killed.kills), "kinds": {k: kinds.count(k) for k in KINDS},
            "starts": killed.starts, "codes": killed.codes, "different": wrong, "left": left,
            "seconds_alone": round(alone.seconds), "seconds_killed": round(killed.seconds),
            "cpu_seconds": {name: round(value, 2) for name, value in cpu.items()}, "engine_share": round(share, 4),
            "fine": fine and len(killed.kills) == asked.kills,
        }  # fmt: skip
    sys.stdout.write(json.dumps(row) + "\n")
    if asked.rows:
        with asked.rows.open("a") as rows:
            rows.write(json.dumps(row) + "\n")
    sys.exit(0 if row["fine"] else 1)


if __name__ == "__main__":
    main()
