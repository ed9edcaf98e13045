"""Runs that are killed and restarted until they end, compared with an undisturbed run.

benchmarks/chaos.py kills a hundred times, tests/test_chaos.py twice.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import shared_memory
from command_budgets import BUDGETS
from command_harness import MAIN, PYTHON, TORCHRUN_VARIABLES, left_behind, run_folders, summary_of
from reaper import having
from run_equality import differences as bits_of_difference
from run_equality import reproducible
from sockets import Process, living

# All three stages in about ten seconds; an iteration takes some hundredths of a second, so that a kill hits all of it.
TINY = (
    *BUDGETS, "run=ddp", "env_args.map_name=3m", "buffer_size=24", "updates_per_iteration=2", "test_interval=500",
    "log_interval=200", "runner_log_interval=200", "learner_log_interval=200", "save_model_interval=800",
    "graph_pretrain_epochs=6", "graph_pretrain_eval_interval=2", "epsilon_anneal_time=1000", "rnn_hidden_dim=16",
    "mixing_embed_dim=8", "hypernet_embed=8", "tokenizer_config.dropout=0.1", "mask_predictor_config.dropout=0.1",
    "dist_timeout_minutes=1", "auto_resume=True",
)  # fmt: skip
# One stage of any learner, in seconds.
SMALL = (
    "run=ddp", "use_cuda=False", "rnn_hidden_dim=8", "test_nepisode=2", "test_interval=2500", "log_interval=200",
    "runner_log_interval=200", "learner_log_interval=200", "save_model_interval=800", "dist_timeout_minutes=1",
    "auto_resume=True",
)  # fmt: skip
KINDS = ("rank", "worker", "launcher", "group", "stop")
"""Who gets SIGKILL: a rank, an environment's worker, the launcher, all at once; `stop`: SIGTERM for the launcher."""
MOMENTS = ("start", "save", "any")
PATIENCE = 300.0


@dataclass
class Kill:
    """One kill: what was hit, when, and stage and iteration of the newest checkpoint. saving: one was being written."""

    kind: str
    moment: str
    stage: str = ""
    iteration: int = -1
    saving: bool = False


def family(leader: int) -> dict[int, str]:
    """Return the living processes of a session by id, with their roles: launcher, forkserver, rank, worker, …"""
    found = {pid: process for pid, process in living().items() if process.session == leader}
    return {pid: _role(pid, leader, found) for pid in found}


def _role(pid: int, leader: int, found: dict[int, Process]) -> str:
    own, above = found[pid], found.get(found[pid].parent)
    if pid == leader:
        return "launcher"
    for mark in ("resource_tracker", "forkserver"):
        # What a forkserver forks has its command line too.
        if mark.encode() in own.line and (above is None or mark.encode() not in above.line):
            return mark
    is_below = above is not None and _role(own.parent, leader, found) in {"rank", "worker"}
    return "worker" if is_below else "rank"


@dataclass
class Trial:
    """One configuration, in a folder of its own: started, killed, started again.

    Args:
        place: an empty folder. words: of the configuration, after `sizes`.
        stride: iterations between two kills, at most. options: of the command line, before the configuration.
        ranks: numbers of ranks of one start after another, in turn; none: what `words` say. sizes: small ones.
    """

    place: Path
    words: tuple[str, ...]
    stride: int = 8
    options: tuple[str, ...] = ("--config=omagd_small",)
    ranks: tuple[int, ...] = ()
    sizes: tuple[str, ...] = TINY
    codes: list[int] = field(default_factory=list)
    kills: list[Kill] = field(default_factory=list)
    groups: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.temporary = self.place / "tmp"
        self.temporary.mkdir(parents=True)
        self.shared = shared_memory.names()

    def start(self) -> subprocess.Popen[bytes]:
        """Start the command, leader of a session of its own."""
        kept = {key: value for key, value in os.environ.items() if key not in TORCHRUN_VARIABLES}
        words = [*self.sizes, *self.words]
        words += [f"world_size={self.ranks[self.starts % len(self.ranks)]}"] if self.ranks else []
        own = {"TMPDIR": str(self.temporary), "TORCHINDUCTOR_CACHE_DIR": str(self.place / "torch")}
        with (self.place / f"output_{self.starts}").open("wb") as output:
            process = subprocess.Popen(
                [PYTHON, MAIN, "-u", *self.options, "with", *words], cwd=self.place,
                env={**kept, "OMP_NUM_THREADS": "1", **own}, stdin=subprocess.DEVNULL,
                stdout=output, stderr=output, start_new_session=True,
            )  # fmt: skip
        self.groups.append(process.pid)
        return process

    @property
    def starts(self) -> int:
        return len(self.groups)

    def undisturbed(self) -> Path:
        """Run to the end; return the run's folder."""
        code = self.start().wait(PATIENCE)
        assert code == 0, f"exit code {code}\n{self.output()}"
        return self.folder

    @property
    def folder(self) -> Path:
        """The only run's folder."""
        (folder,) = run_folders(self.place)
        return folder

    def output(self) -> str:
        """Return the end of the last start's output."""
        return (self.place / f"output_{self.starts - 1}").read_text(errors="replace")[-3000:]

    def disturbed(
        self, chance: random.Random, plan: list[tuple[str, str]], report: Callable[[Kill], None] = lambda kill: None
    ) -> Path:
        """Run to the end, with a kill for each (kind, moment) of the plan that it lives to see; return the folder."""
        process = self.start()
        try:
            while True:
                left = plan[len(self.kills) :]
                if left and (kill := self._strike(process, *left[0], chance)):
                    self.kills.append(kill)
                    report(kill)
                    if kill.kind in {"rank", "worker"}:
                        continue
                code = process.wait(PATIENCE)
                self.codes.append(code)
                if code == 0:
                    return self.folder
                # A process that is stopped before it handles signals ends as any other does.
                stopped = {143, -signal.SIGTERM} if self.kills and self.kills[-1].kind == "stop" else set()
                assert code in {-signal.SIGKILL, 1, *stopped}, f"exit code {code}\n{self.output()}"
                ranks = sum(kill.kind == "rank" for kill in self.kills)
                assert code != 1 or ranks > 3, f"it gave up\n{self.output()}"
                if chance.random() < 0.5:  # the other half meets ranks that have not ended yet
                    left_behind(process.pid, 20)
                process = self.start()
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)

    def _strike(self, process: subprocess.Popen[bytes], kind: str, moment: str, chance: random.Random) -> Kill | None:
        """Kill what `kind` says at a moment; return None where the run came to its end before."""
        known = self.newest()[0]
        if moment == "start":
            self._sleep(process, chance.uniform(0.0, 4.0))
        else:
            enough = max(known, 0) + chance.randint(1, self.stride)
            self._wait(process, lambda: self.newest()[0] >= enough)
            self._sleep(process, chance.uniform(0.0, 0.3))
        if moment == "save":
            self._wait(process, lambda: bool(self._partials()))
            time.sleep(chance.uniform(0.0, 0.03))
        if process.poll() is not None:
            return None
        victims = [process.pid]
        if kind in {"rank", "worker"}:
            self._wait(process, lambda: kind in family(process.pid).values(), 20)
            victims = [pid for pid, role in sorted(family(process.pid).items()) if role == kind]
        if not victims or process.poll() is not None:
            return None
        iteration, stage, _ = self.newest()
        kill = Kill(kind, moment, stage, iteration, bool(self._partials()))
        self.measure(kill)
        try:
            victim = -process.pid if kind == "group" else chance.choice(victims)
            os.kill(victim, signal.SIGTERM if kind == "stop" else signal.SIGKILL)
        except ProcessLookupError:
            return None
        if kind not in {"rank", "worker"}:
            process.wait(PATIENCE)
            left_behind(process.pid, 20)
            self.measure(kill, ended=True)
        return kill

    def measure(self, kill: Kill, ended: bool = False) -> None:
        """Measure what a kill costs: just before it, and once all processes have ended. The benchmark does."""

    def newest(self) -> tuple[int, str, float]:
        """Return iteration, stage and time of the newest checkpoint; -1 before there is one."""
        for folder in sorted(self.place.glob("results/*/checkpoints/[0-9]*"), reverse=True):
            with contextlib.suppress(OSError, ValueError, KeyError):
                manifest = json.loads((folder / "manifest.json").read_text())
                return manifest["iteration"], manifest["stage"], (folder / "manifest.json").stat().st_mtime
        return -1, "", 0.0

    def _partials(self) -> list[Path]:
        return list(self.place.glob("results/*/checkpoints/.*.partial"))

    @staticmethod
    def _sleep(process: subprocess.Popen[bytes], seconds: float) -> None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(seconds)

    @staticmethod
    def _wait(process: subprocess.Popen[bytes], true: Callable[[], bool], patience: float = PATIENCE) -> None:
        until = time.monotonic() + patience
        while not true() and process.poll() is None and time.monotonic() < until:
            time.sleep(0.005)

    def left(self) -> list[str]:
        """Return what this trial has left: processes, shared memory, temporary and half-written files."""
        found = [f"process {line}" for group in self.groups for line in left_behind(group, 10)]
        found += [f"process {pid}" for pid in having("TMPDIR", str(self.temporary))]
        files = [*self.temporary.rglob("*"), *(self.place / "results").rglob(".*")]
        return [*found, *shared_memory.left_since(self.shared), *map(str, files)]


def differences(one: Path, other: Path) -> list[str]:
    """Return in what two runs differ that must not: weights, metrics, episodes, results. Empty: the same bits."""
    stages = [summary_of(run)["stages"] for run in (one, other)]
    results = [{name: (each["clock"], reproducible(each["values"])) for name, each in run.items()} for run in stages]
    found = bits_of_difference(one, other) + [f"summary: {results}"] * (results[0] != results[1])
    return found if any((one / "episodes").glob("*.jsonl")) else [*found, f"{one}: no episodes to compare"]
