"""Kills at random moments: whether runs that were killed end as those that were left alone.

    python benchmarks/chaos.py [--kills 100] [--seed 1] [--only rounds workers] [--rows benchmarks/results/chaos.jsonl]
    python benchmarks/chaos.py --of dealing --rows benchmarks/results/chaos_dealing.jsonl

Small runs of the whole method on skirmish with two or three ranks, as users type them, with `auto_resume=True`. Each
is killed several times by SIGKILL, a random rank, a random environment worker, the launcher or all of it at once, at
random moments, some while a checkpoint is being written, and started again until it ends. Then all weights,
`metrics.jsonl` (without what measures the machine), the episodes of every rank and the results are compared with those
of a run of the same configuration that was left alone, and what is left on the machine is looked for: processes (and
with them ports), shared memory, temporary and half-written files. For each kill it reports how many iterations the
newest checkpoint did not have, and how old it was.

`--of dealing`: one stage, of learners on groups and on sets of maps, in every way to deal the maps to ranks, also with
SIGTERM. Where the ranks' speed decides who plays what, runs are not the same bit for bit. Then, and where the run goes
on with another number of ranks, all counts must be exact: they are computed again from the episodes.

Exit code 1 where anything differs, is left, or more was repeated
than one interval and the time that writing a checkpoint takes.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from chaos_harness import KINDS, MOMENTS, SMALL, TINY, Kill, Trial, differences  # noqa: E402
from run_counts import miscounted  # noqa: E402


@dataclass(frozen=True)
class Variant:
    """One configuration.

    Attributes:
        words: of the configuration. interval: seconds between checkpoints. preset: of the method, empty: all stages.
        same: what must be that of a run that was left alone: `bits`, or nothing but that all
            counts are those of the episodes. ranks: numbers of ranks of one start after another. stride: iterations
            between two kills, at most.
    """

    words: tuple[str, ...]
    interval: float = 0.0
    preset: str = ""
    same: str = "bits"
    ranks: tuple[int, ...] = ()
    stride: int = 8

    @property
    def kinds(self) -> list[str]:
        """Return what can be killed; a rank restarts with as many others as before."""
        if self.preset:
            return ["launcher", "group", "stop"] if self.ranks else ["rank", "launcher", "group", "stop"]
        workers = "env_processes=True" in self.words
        return [kind for kind in KINDS if kind != "stop" and (workers or kind != "worker")]

    @property
    def sizes(self) -> tuple[str, ...]:
        """Return the small sizes of its runs."""
        return SMALL if self.preset else TINY

    @property
    def options(self) -> tuple[str, ...]:
        """Return what comes before the configuration."""
        return (f"--config={self.preset}", "--env-config=skirmish") if self.preset else ("--config=omagd_small",)


METHOD = {
    "rounds": Variant(("world_size=2", "runner=parallel")),
    "stream": Variant(("world_size=2", "runner=stream")),
    "workers": Variant(("world_size=2", "runner=parallel", "env_processes=True"), interval=0.5),
    "stream of workers": Variant(("world_size=2", "runner=stream", "env_processes=True")),
    "three ranks": Variant(("world_size=3", "runner=parallel", "env_processes=True"), interval=1.0),
}


RLOO = (
    "env_args.map_name=4m_vs_2m", "batch_size_run=4", "batch_size=8", "group_size=2", "learner_args.epochs=2",
    "enable_dynamic_sampling=True", "max_sampling_attempts=2",
)  # fmt: skip
SET = ("env_args.map_name=2m,3m_vs_2m", "batch_size_run=4", "batch_size=8", "sync_every_n_steps=3")
PPO = (*SET, "learner_args.epochs=2")
QMIX = (*SET, "buffer_size=24", "updates_per_iteration=2", "epsilon_anneal_time=1000")
SHARDED = (*PPO, "task_dealing=sharded")
IN_TURN = (*SHARDED, "balance_tasks_across_gpus=False")
OTHERS = {"ranks": (2, 1, 3, 2), "same": ""}
DEALING = {
    "rloo": Variant(RLOO, preset="rloo", stride=3),
    "sharded": Variant(IN_TURN, preset="hpn_mappo", stride=3),
    "round robin": Variant(QMIX, preset="hpn_qmix", stride=3),
    "sharded by seconds": Variant(SHARDED, preset="hpn_mappo", same="", stride=3),
    "rloo, other ranks": Variant(RLOO, preset="rloo", stride=3, **OTHERS),
    "sharded, other ranks": Variant(IN_TURN, preset="hpn_mappo", stride=3, **OTHERS),
    "round robin, other ranks": Variant(QMIX, preset="hpn_qmix", stride=3, **OTHERS),
}
"""Runs of one stage, by how their maps are dealt. `other ranks`: each start has another number of them."""
VARIANTS = {**METHOD, **DEALING}


@dataclass
class MeasuredKill(Kill):
    """A kill and its cost.

    Attributes:
        repeated: iterations that were repeated, from the episodes that rank 0 had logged; -1 where unknown.
        seconds: since the newest checkpoint, or since the ranks resumed from it where that is later; 0 if they had not.
    """

    repeated: int = -1
    seconds: float = 0.0


class MeasuredTrial(Trial):
    """A trial that measures the cost of each kill."""

    since = 0.0

    def start(self) -> subprocess.Popen[bytes]:
        """Start the command."""
        self.since = time.time()
        return super().start()

    def measure(self, kill: Kill, ended: bool = False) -> None:
        """Note the age of the newest checkpoint before the kill, and the iterations that it lacks."""
        if ended:
            self.repeated = self._to_repeat()
            return
        went_on = self._went_on()
        self.seconds = round(time.time() - max(self.newest()[2], went_on), 3) if went_on else 0.0
        self.repeated = self._to_repeat() if kill.kind == "rank" else -1
        if kill.kind == "rank":
            self.since = time.time()

    def _to_repeat(self) -> int:
        """Return how many iterations of stage 3 the newest checkpoint lacks, by the episodes of rank 0."""
        for folder in sorted(self.place.glob("results/*/checkpoints/[0-9]*"), reverse=True):
            log = folder.parents[1] / "episodes" / "rank_0.jsonl"
            try:
                size = torch.load(folder / "rank_0.th", weights_only=True)["episode_bytes"]
                lines = log.read_bytes()[int(size) :].splitlines(keepends=True) if log.exists() else []
                return len({json.loads(line)["t_env"] for line in lines if line.endswith(b"\n")})
            except (OSError, KeyError, RuntimeError, EOFError, ValueError):
                continue
        return -1

    def _went_on(self) -> float:
        """Return when the ranks of this start began to play or went on; 0 where they have not yet."""
        for log in self.place.glob("results/*/logs/rank_0.log"):
            said = [line for line in log.read_text().splitlines() if "continuing from" in line or "results: " in line]
            if said:
                when = time.mktime(time.strptime(said[-1][:19], "%Y-%m-%d %H:%M:%S"))
                resumes = "continuing from" in said[-1] or self.newest()[0] < 0
                return when if resumes and when >= self.since - 1.0 else 0.0
        return 0.0


@dataclass
class Seen:
    """What one variant came to."""

    kills: list[MeasuredKill] = field(default_factory=list)
    runs: int = 0
    starts: int = 0
    wrong: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    seconds: float = 0.0


def say(text: str) -> None:
    """Print a line at once."""
    sys.stdout.write(f"[{time.strftime('%H:%M:%S')}] {text}\n")
    sys.stdout.flush()


def plan_of(variant: Variant, kills: int, chance: random.Random) -> list[tuple[str, str]]:
    """Return what is to be killed, and when: every kind and every moment as often as any other, in random order."""
    kinds = [variant.kinds[number % len(variant.kinds)] for number in range(kills)]
    moments = [MOMENTS[number % len(MOMENTS)] for number in range(kills)]
    chance.shuffle(kinds)
    chance.shuffle(moments)
    return list(zip(kinds, moments, strict=True))


def compared(variant: Variant, alone: Trial, killed: Path) -> list[str]:
    """Return in what a killed run differs that must not, from one that was left alone or from its own episodes."""
    found = miscounted(killed) if variant.preset else []
    if variant.same == "bits":
        return found + differences(alone.folder, killed)
    return found


def try_variant(name: str, kills: int, asked: argparse.Namespace, place: Path) -> Seen:
    """Make `kills` kills in runs of one variant."""
    variant, seen, begun = VARIANTS[name], Seen(), time.monotonic()
    end = (f"max_episodes={asked.t_max // 10}", f"t_max={100 * asked.t_max}") if variant.preset else ()
    interval = f"checkpoint_interval={variant.interval}"
    words = ("world_size=2", *variant.words, f"t_max={asked.t_max}", interval, *end)
    alone = Trial(place / "alone", words, options=variant.options, sizes=variant.sizes)
    if variant.same:
        alone.undisturbed()
        seen.left += alone.left()
        say(f"{name}: left alone in {time.monotonic() - begun:.1f} s")
    chance = random.Random(f"{asked.seed} {name}")
    plan = plan_of(variant, kills, chance)
    while len(seen.kills) < kills:
        shape = variant.stride, variant.options, variant.ranks, variant.sizes
        trial = MeasuredTrial(place / f"killed_{seen.runs}", words, *shape)
        ahead = plan[len(seen.kills) : len(seen.kills) + asked.per_run]

        def report(plain: Kill, trial: MeasuredTrial = trial) -> None:
            kill = MeasuredKill(**asdict(plain), repeated=trial.repeated, seconds=trial.seconds)
            seen.kills.append(kill)
            while_saving = ", while a checkpoint was written" if kill.saving else ""
            say(
                f"{name}: kill {len(seen.kills)} of {kills}: {kill.kind} after iteration {kill.iteration} "
                f"({kill.stage or 'no checkpoint'}){while_saving}; the newest is {kill.seconds:.2f} s old"
            )

        try:
            folder = trial.disturbed(chance, ahead, report)
            wrong = compared(variant, alone, folder)
        except (AssertionError, OSError, ValueError) as error:
            wrong = [f"{type(error).__name__}: {str(error)[-1500:]}"]
        seen.runs, seen.starts = seen.runs + 1, seen.starts + trial.starts
        left = trial.left()
        verdict = f"{wrong or 'nothing differs'}; left: {left or 'nothing'}"
        say(f"{name}: run {seen.runs} after {trial.starts} starts: {verdict}")
        seen.wrong += wrong
        seen.left += left
        if wrong and not trial.kills:
            break
    seen.seconds = time.monotonic() - begun
    return seen


def row(name: str, seen: Seen, asked: argparse.Namespace) -> dict[str, Any]:
    """Return the figures of a variant."""
    kills, interval = seen.kills, VARIANTS[name].interval
    seconds = [kill.seconds for kill in kills]
    repeated = [kill.repeated for kill in kills if kill.repeated >= 0]
    return {
        "variant": name,
        "compared": VARIANTS[name].same or "own counts",
        "checkpoint_interval": interval,
        "runs": seen.runs,
        "starts": seen.starts,
        "kills": len(kills),
        **{f"kills_{kind}": sum(kill.kind == kind for kill in kills) for kind in KINDS},
        "kills_while_saving": sum(kill.saving for kill in kills),
        "kills_by_stage": {s: sum(kill.stage == s for kill in kills) for s in ("", "stage1", "stage2", "stage3")},
        "lost_seconds_median": round(statistics.median(seconds), 3) if seconds else 0.0,
        "lost_seconds_most": max(seconds, default=0.0),
        "repeated_iterations_most": max(repeated, default=0),
        "different": seen.wrong,
        "left": seen.left,
        "seconds": round(seen.seconds),
        "fine": not seen.wrong and not seen.left and max(seconds, default=0.0) <= interval + asked.slack,
    }


def main() -> None:
    """Kill, compare, print a table; end with 1 where something is not as it must be."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=100, help="in all")
    parser.add_argument("--per-run", type=int, default=5, help="kills of one run")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--t-max", type=int, default=2000, help="steps of stage 3")
    parser.add_argument("--slack", type=float, default=3.0, help="seconds that an iteration and a checkpoint may take")
    parser.add_argument("--of", default="method", choices=["method", "dealing"])
    parser.add_argument("--only", nargs="+", choices=list(VARIANTS))
    parser.add_argument("--keep", type=Path, help="leave the runs in this folder")
    parser.add_argument("--rows", type=Path, help="write a JSON object for each variant, and one for each kill, here")
    asked = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what is running is ended too
    names = asked.only or list(METHOD if asked.of == "method" else DEALING)
    found: dict[str, Seen] = {}
    with tempfile.TemporaryDirectory(prefix="chaos_") as folder:
        for number, name in enumerate(names):
            share = asked.kills * (number + 1) // len(names) - asked.kills * number // len(names)
            own = (asked.keep or Path(folder)) / name.replace(",", "").replace(" ", "_")
            found[name] = try_variant(name, share, asked, own)
    rows = [row(name, seen, asked) for name, seen in found.items()]
    total = sum(line["kills"] for line in rows)
    for line in rows:
        sys.stdout.write(json.dumps(line) + "\n")
    fine = total >= asked.kills and all(line["fine"] for line in rows)
    sys.stdout.write(f"{total} kills, {total if fine else 'not all'} recoveries\n")
    if asked.rows:
        kills = [{"variant": name, **asdict(kill)} for name, seen in found.items() for kill in seen.kills]
        asked.rows.write_text("".join(json.dumps(line) + "\n" for line in [*rows, *kills]))
    sys.exit(0 if fine else 1)


if __name__ == "__main__":
    main()
