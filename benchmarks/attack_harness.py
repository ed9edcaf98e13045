"""Random faults, each on a run of its own: damaged files, kills, full disks, values that are not finite, planted links.

Used by benchmarks/attack.py, which makes hundreds of them. Every trial starts the real
command line in a forked process, so that the imports are paid for once.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import random
import resource
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from chaos_harness import TINY as TINY_STAGES
from run_equality import differences

import omagd.run.reporting.sacred_record
import omagd.run.run_ddp
import omagd.run.training.experiment
import omagd.run.training.stages  # noqa: F401 (imported here once, for all starts)
from omagd.run.cli.main import main

KINDS = ("damage", "kill", "disk", "nan", "link")
PATIENCE = 120.0
TINY = (
    "use_cuda=False", "batch_size_run=2", "batch_size=4", "buffer_size=6", "t_max=120", "updates_per_iteration=1",
    "rnn_hidden_dim=8", "mixing_embed_dim=4", "hypernet_embed=4", "test_nepisode=2", "test_interval=40",
    "log_interval=8", "runner_log_interval=8", "learner_log_interval=8", "save_model_interval=40",
    "checkpoint_interval=0", "dist_timeout_minutes=1", "auto_resume=True",
)  # fmt: skip
VARIANTS = {
    "one process": ("--config=qmix", "--env-config=memory_game", "with", *TINY, "run=default"),
    "matrix game": ("--config=qmix", "--env-config=matrix_game", "with", *TINY, "run=default"),
    "two ranks": ("--config=qmix", "--env-config=memory_game", "with", *TINY, "run=ddp", "world_size=2"),
    "three stages": (
        "--config=omagd_small",
        "with",
        *TINY_STAGES,
        "run=default",
        "t_max=250",
        "graph_pretrain_epochs=4",
        "save_model_interval=100",
        "checkpoint_interval=0",
    ),
}
# What a start may write or clear away even if it is then rejected: locks and text logs.
NOT_COMPARED = ("lock", "lock.ranks", "logs/")


@dataclass
class Trial:
    """One run in a folder of its own, started one or more times.

    Args:
        place: an empty folder. words: of the command line.
    """

    place: Path
    words: tuple[str, ...]
    starts: int = 0
    said: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.place.mkdir(parents=True, exist_ok=True)
        (self.place / "tmp").mkdir(exist_ok=True)
        self.groups: list[int] = []

    def begin(self, *more: str, prepare: Callable[[], None] | None = None) -> int:
        """Start the command in a process and a session of its own; return its process id."""
        path = self.place / f"said_{self.starts}"
        self.starts += 1
        path.touch()
        sys.stdout.flush()
        pid = os.fork()
        if pid == 0:
            self._be_the_command(path, more, prepare)
        self.groups.append(pid)
        return pid

    def _be_the_command(self, path: Path, more: tuple[str, ...], prepare: Callable[[], None] | None) -> None:
        code = 70
        try:
            os.setsid()
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            out = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
            os.dup2(out, 1)
            os.dup2(out, 2)
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            sys.stdout, sys.stderr = os.fdopen(1, "w", 1, closefd=False), os.fdopen(2, "w", 1, closefd=False)
            os.chdir(self.place)
            os.environ |= {"TMPDIR": str(self.place / "tmp"), "TORCHINDUCTOR_CACHE_DIR": str(self.place / "torch")}
            if prepare is not None:
                prepare()
            code = main(["-u", *self.words, *more])
        except BaseException:  # noqa: BLE001 (an escaped error is what the trial looks for)
            import traceback

            traceback.print_exc()
        finally:
            with contextlib.suppress(Exception):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(code)

    def end(self, pid: int, patience: float = PATIENCE) -> int:
        """Wait for a start; return its exit code, negative for a signal. Kills it after `patience` seconds."""
        until = time.monotonic() + patience
        while time.monotonic() < until:
            found, status = os.waitpid(pid, os.WNOHANG)
            if found:
                self.said.append((self.place / f"said_{self.starts - 1}").read_text(errors="replace"))
                return os.waitstatus_to_exitcode(status)
            time.sleep(0.01)
        os.killpg(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        self.said.append((self.place / f"said_{self.starts - 1}").read_text(errors="replace"))
        return -999

    def run(self, *more: str, prepare: Callable[[], None] | None = None) -> int:
        """Start and wait."""
        return self.end(self.begin(*more, prepare=prepare))

    @property
    def folders(self) -> list[Path]:
        """The run folders, oldest first."""
        found = [path.parent for path in (self.place / "results").glob("*/run.json")]
        return sorted(found, key=lambda path: path.stat().st_mtime)

    def checkpoints(self) -> int:
        """Return the number of the newest complete checkpoint, -1 without one."""
        names = [path.name for path in (self.place / "results").glob("*/checkpoints/[0-9]*")]
        return max((int(name) for name in names), default=-1)

    def kill_after(self, pid: int, checkpoint: int, delay: float, number: int = signal.SIGKILL) -> int:
        """Wait for a checkpoint, then `delay` seconds, then send a signal to the launcher; return its exit code."""
        until = time.monotonic() + PATIENCE
        while self.checkpoints() < checkpoint and time.monotonic() < until:
            found, status = os.waitpid(pid, os.WNOHANG | os.WUNTRACED)
            if found:
                return self._ended(status)
            time.sleep(0.002)
        time.sleep(delay)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
        return self.end(pid)

    def _ended(self, status: int) -> int:
        self.said.append((self.place / f"said_{self.starts - 1}").read_text(errors="replace"))
        return os.waitstatus_to_exitcode(status)

    def general_faults(self) -> list[str]:
        """Return what must never happen: a traceback, a hang, a process or a temporary file that is left."""
        wrong = [f"start {n}: a traceback" for n, said in enumerate(self.said) if "Traceback (most recent" in said]
        wrong += [f"start {n}: C++ frames" for n, said in enumerate(self.said) if "frame #" in said]
        for group in self.groups:
            wrong += [f"process left: {line}" for line in _living(group)]
        wrong += [f"temporary file left: {path.name}" for path in (self.place / "tmp").rglob("*")]
        return wrong


def _living(session: int, patience: float = 10.0) -> list[str]:
    """Return the command lines of the living processes of a session, after some seconds to end."""
    until = time.monotonic() + patience
    while True:
        found = []
        for entry in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError, IndexError):
                fields = entry.read_text().rpartition(")")[2].split()
                if fields[3] == str(session) and fields[0] not in "ZX":
                    found.append(entry.parent.name)
        if not found or time.monotonic() > until:
            return found
        time.sleep(0.05)


def snapshot(folder: Path) -> dict[str, str]:
    """Return kind and content of everything in a folder, by relative path; links are not followed."""
    found = {}
    for root, folders, files in os.walk(folder):
        for name in [*folders, *files]:
            path = Path(root) / name
            key = str(path.relative_to(folder))
            mode = path.lstat().st_mode
            if stat.S_ISLNK(mode):
                found[key] = f"link to {os.readlink(path)}"
            elif stat.S_ISREG(mode):
                found[key] = hashlib.sha256(path.read_bytes()).hexdigest()
            else:
                found[key] = "folder" if stat.S_ISDIR(mode) else "special"
    return found


def compared(content: dict[str, str]) -> dict[str, str]:
    """Return a snapshot without locks and text logs."""
    return {name: value for name, value in content.items() if not name.startswith(NOT_COMPARED) and name != "logs"}


# --- what each kind of fault does


@dataclass
class Result:
    """What came of one fault: how the starts ended, what was wrong (nothing, if all is well)."""

    kind: str
    number: int
    fault: str
    codes: list[int]
    wrong: list[str]
    seconds: float = 0.0


class Attack:
    """Faults of all kinds, below one folder.

    Args:
        root: an empty folder. alone: folder of the runs that nothing has disturbed, made when they are needed.
    """

    def __init__(self, root: Path, alone: Path | None = None) -> None:
        self.root, self._alone = root, alone or root
        torch.set_num_threads(1)

    def alone(self, variant: str) -> Path:
        """Return the folder of a run of a variant that nothing has disturbed."""
        trial = Trial(self._alone / f"alone_{variant.replace(' ', '_')}", VARIANTS[variant])
        if not trial.folders:
            code = trial.run()
            assert code == 0, trial.said
        return trial.folders[0]

    def fault(self, kind: str, number: int, seed: int) -> Result:
        """Make one fault and judge what came of it. `seed` and `number` decide everything but the moment."""
        rng = random.Random(f"{seed} {kind} {number}")
        share = rng.random()
        # Spawned ranks do not inherit the spoiled environment.
        variant = "two ranks" if share < 0.1 and kind != "nan" else rng.choice(["one process", "matrix game"])
        variant = "three stages" if share > 0.94 and kind != "nan" else variant
        place, begun = self.root / f"{kind}_{number}", time.monotonic()
        trial = Trial(place, VARIANTS[variant])
        try:
            fault, codes, wrong = getattr(self, f"_{kind}")(trial, variant, rng)
        except (
            AssertionError,
            OSError,
            LookupError,
            ValueError,
        ) as error:  # a trial that could not be judged is no success
            fault, codes, wrong = "not judged", [], [f"{type(error).__name__}: {error} {''.join(trial.said)[-300:]}"]
        wrong += trial.general_faults()
        result = Result(kind, number, f"{variant}: {fault}", codes, wrong, round(time.monotonic() - begun, 2))
        if not wrong:
            shutil.rmtree(place, ignore_errors=True)
        return result

    def _cut(self, trial: Trial, rng: random.Random) -> Path:
        """Kill a run somewhere in its middle; return its folder."""
        pid = trial.begin()
        trial.kill_after(pid, rng.randrange(2, 25), rng.random() * 0.05)
        _living(pid, PATIENCE)  # its ranks may need a moment to notice
        return trial.folders[0]

    # damage

    def _damage(self, trial: Trial, variant: str, rng: random.Random) -> tuple[str, list[int], list[str]]:
        """Damage some files of a run that was killed, then continue it with each value of `resume`."""
        run = self._cut(trial, rng)
        codes: list[int] = []
        wrong: list[str] = []
        damages = [damage(run, rng) for _ in range(rng.choice([1, 1, 2, 3]))]
        fault, names = "; ".join(f"{name} {what}" for name, what in damages), tuple(name for name, _ in damages)
        lines = any(name.startswith(("metrics", "episodes")) for name in names)  # no checkpoint holds their content
        for how in ("exact", "lossy", "weights"):
            before = snapshot(run)
            said_of_new = set(trial.folders)
            codes.append(trial.run(f"resume={how}"))
            after = snapshot(run)
            if codes[-1] == 2:
                gone = {k for k, v in compared(before).items() if compared(after).get(k) != v}
                wrong += [f"resume={how} was rejected, but changed {sorted(gone)[:4]}"] * bool(gone)
                wrong += one_line(trial.said[-1], f"resume={how}")
                continue
            if codes[-1] != 0:
                wrong.append(f"resume={how}: exit code {codes[-1]}: {trial.said[-1][-300:]}")
                continue
            folder = run if set(trial.folders) == said_of_new else trial.folders[-1]
            if how == "exact" and not lines:
                wrong += [f"exact, but {line}" for line in differences(self.alone(variant), folder, names)][:3]
            if folder == run:
                wrong += lost(before, after, self.alone(variant), how, names)
            elif compared(before) != compared(after):
                wrong.append("a new folder began, but the old one was changed")
            break
        else:
            wrong.append("no value of resume continues") if not _nothing_left(run) else None
        return fault, codes, wrong

    # kills

    def _kill(self, trial: Trial, variant: str, rng: random.Random) -> tuple[str, list[int], list[str]]:
        """Send some signals at random moments, then let the command end; compare with a run left alone."""
        signals = [
            rng.choice(("SIGKILL", "SIGTERM", "SIGINT", "SIGABRT", "SIGSEGV", "SIGHUP"))
            for _ in range(rng.randint(1, 3))
        ]
        codes = []
        for name in signals:
            pid = trial.begin()
            after = rng.choice([-1, rng.randrange(1, 50)])
            codes.append(
                trial.kill_after(pid, after, rng.random() * (1.0 if after < 0 else 0.2), getattr(signal, name))
            )
            if codes[-1] == 0:
                break
        if codes[-1] != 0:
            codes.append(trial.run())
        wrong = [] if codes[-1] == 0 else [f"exit code {codes[-1]}: {trial.said[-1][-300:]}"]
        if not wrong:
            ends = [differences(self.alone(variant), folder) for folder in trial.folders if _finished(folder)]
            wrong = [] if ends and not any(ends) else [f"not the same bits: {ends}"]
            wrong += [f"{len(trial.folders)} folders"] * (len(trial.folders) != 1)
        return " ".join(signals), codes, wrong

    # a full disk

    def _disk(self, trial: Trial, variant: str, rng: random.Random) -> tuple[str, list[int], list[str]]:
        """Let a disk or a file-size limit be reached, then make room and type the command again."""
        whole = sum(path.stat().st_size for path in self.alone(variant).rglob("*") if path.is_file())
        results = trial.place / "results"
        results.mkdir()
        if os.geteuid() == 0 and rng.random() < 0.7:
            size = rng.randrange(40_000, int(whole * 1.2)) // 4096 * 4096
            options = f"size={size},mode=755"
            mounted = subprocess.run(
                ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(results)], capture_output=True
            )
            if mounted.returncode == 0:
                try:
                    return self._fill(trial, variant, f"a disk of {size} bytes", None, results)
                finally:
                    kept = trial.place / "kept"
                    shutil.copytree(results, kept, symlinks=True)
                    subprocess.run(["umount", "-l", str(results)], check=True, capture_output=True)
        limit = rng.randrange(200, 60_000)

        def prepare() -> None:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

        return self._fill(trial, variant, f"files of at most {limit} bytes", prepare, None)

    def _fill(
        self, trial: Trial, variant: str, fault: str, prepare: Callable[[], None] | None, mount: Path | None
    ) -> tuple[str, list[int], list[str]]:
        codes, wrong = [trial.run(prepare=prepare)], []
        said = [
            line for line in trial.said[-1].splitlines() if "Errno" in line or "No space" in line or "too large" in line
        ]
        wrong += [f"{len(said)} lines about the disk"] * (len(said) > 60)
        if codes[0] not in (0, 1, 2):
            wrong.append(f"exit code {codes[0]}: {trial.said[-1][-300:]}")
        if codes[0] == 0 and not all(_final_weights(folder) for folder in trial.folders):
            wrong.append("exit code 0, but the final weights are not there")
        if mount is not None:
            subprocess.run(["mount", "-o", "remount,size=256m", str(mount)], check=True, capture_output=True)
        if codes[0] != 0:
            codes.append(trial.run())
            if codes[-1] != 0:
                wrong.append(f"with room again: exit code {codes[-1]}: {trial.said[-1][-300:]}")
            elif not any(_final_weights(folder) for folder in trial.folders):
                wrong.append("with room again: no final weights")
        return fault, codes, wrong

    # numbers that are not finite

    def _nan(self, trial: Trial, variant: str, rng: random.Random) -> tuple[str, list[int], list[str]]:
        """Let the environment return something that is no number once, or from some step on."""
        where = rng.choice(["reward", "obs", "state", "avail"])
        value = rng.choice([float("nan"), float("inf"), -float("inf"), 1e39])
        at, always = rng.randrange(1, 60), rng.random() < 0.5

        code = trial.run(prepare=lambda: _spoil(variant, where, value, at, always))
        if code == 0 and not always:  # what nobody looked at, as the view of a slot that is not in use, changes nothing
            wrong = [f"exit code 0, but {line}" for line in differences(self.alone(variant), trial.folders[0])][:3]
        else:
            wrong = [f"exit code {code}"] * (code not in (1, 2))
            wrong += one_line(trial.said[-1], "not finite", needs=("reward",) if where == "reward" else ())
        for folder in trial.folders:
            wrong += [f"{path.relative_to(folder)} is not finite" for path in folder.rglob("*.th") if not finite(path)]
        return f"{where}={value} at step {at}{' and after' if always else ''}", [code], wrong

    # planted links

    def _link(self, trial: Trial, variant: str, rng: random.Random) -> tuple[str, list[int], list[str]]:
        """Put a link into a run that was killed, or in the place of its folder; nothing outside may change."""
        run = self._cut(trial, rng)
        outside = trial.place / "outside"
        (outside / "folder" / "deep").mkdir(parents=True)
        for name in ("file", "folder/file", "folder/20", "folder/deep/agent.th", "folder/rank_0.log"):
            (outside / name).write_text(f"precious {name}\n" * 50)
        fault = plant(run, outside, rng)
        before = snapshot(outside)
        codes = [trial.run(f"resume={rng.choice(['exact', 'lossy', 'weights'])}")]
        wrong = [f"outside changed: {sorted(set(before.items()) ^ set(snapshot(outside).items()))[:4]}"] * (
            before != snapshot(outside)
        )
        if codes[0] not in (0, 2):
            wrong.append(f"exit code {codes[0]}: {trial.said[-1][-300:]}")
        raw = [
            line
            for line in trial.said[-1].splitlines()
            if any(ord(c) < 32 and c not in "\t" or ord(c) == 127 for c in line)
        ]
        wrong += [f"a control character was printed: {raw[0][:80]!r}"] if raw else []
        return fault, codes, wrong


def one_line(said: str, what: str, needs: tuple[str, ...] = ()) -> list[str]:
    """Return what is wrong with how an error was reported: exactly one line must start with `error: `."""
    errors = [line for line in said.splitlines() if line.startswith("error: ")]
    if len(errors) != 1:
        return [f"{what}: {len(errors)} error lines: {said[-300:]}"]
    return [f"{what}: {need!r} is not named: {errors[0][:200]}" for need in needs if need not in errors[0]]


def damage(run: Path, rng: random.Random) -> tuple[str, str]:
    """Damage one thing in a run's folder; return its relative path and what was done."""
    entries = sorted(p for p in run.rglob("*") if p.name not in {"lock", "lock.ranks"} and not p.is_symlink())
    files = [p for p in entries if p.is_file()]
    folders = [p for p in entries if p.is_dir()]
    if folders and rng.random() < 0.15:
        path = rng.choice(folders)
        name = str(path.relative_to(run))
        if rng.random() < 0.5:
            path.rename(run.parent.parent / f"moved_{path.name}_{rng.randrange(10**6)}")
            return name, "moved away"
        shutil.rmtree(path)
        return name, "deleted"
    weighty = [p for p in files if "checkpoints" in p.parts]
    path = rng.choice(weighty if weighty and rng.random() < 0.7 else files)
    name = str(path.relative_to(run))
    content = bytearray(path.read_bytes())
    how = rng.choice(["flip", "truncate", "delete", "empty", "garbage", "folder", "longer", "fifo"])
    if how == "flip" and content:
        content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
        path.write_bytes(bytes(content))
    elif how == "truncate":
        path.write_bytes(bytes(content[: rng.randrange(max(1, len(content)))]))
    elif how == "empty":
        path.write_bytes(b"")
    elif how == "garbage":
        path.write_bytes(rng.randbytes(len(content)))
    elif how == "longer":
        path.write_bytes(bytes(content) + rng.randbytes(rng.randrange(1, 400)))
    else:
        path.unlink()
        if how == "folder":
            path.mkdir()
        elif how == "fifo":
            os.mkfifo(path)
    return name, how


def lost(before: dict[str, str], after: dict[str, str], alone: Path, how: str, damaged: tuple[str, ...]) -> list[str]:
    """Return what was intact before a start, was not written again with equal content, and is nowhere any more.

    Weights by content; checkpoints may go once newer ones are complete, which keeps what they held.
    """
    kept = set(after.values()) | set(snapshot(alone).values())
    intact = {name: value for name, value in before.items() if not name.startswith(damaged)}
    weights = [name for name in intact if name.startswith("models/") and name.endswith(".th")]
    return [f"{how}: lost {name}" for name in weights if intact[name] not in kept][:3]


def _nothing_left(run: Path) -> bool:
    """Return whether a run has neither weights nor a checkpoint of which a whole manifest vouches for the weights."""
    for path in run.glob("models/*/agent.th"):
        with contextlib.suppress(Exception):
            torch.load(path, weights_only=True)
            return False
    for manifest in run.glob("checkpoints/[0-9]*/manifest.json"):
        with contextlib.suppress(OSError, ValueError, KeyError):
            name = f"{manifest.parent.name}/common.th"
            known = json.loads(manifest.read_text())["files"][name]["sha256"]
            if hashlib.sha256((run / "checkpoints" / name).read_bytes()).hexdigest() == known:
                return False
    return True


def _finished(folder: Path) -> bool:
    with contextlib.suppress(OSError, ValueError):
        return bool(json.loads((folder / "run.json").read_text()).get("finished"))
    return False


def _final_weights(folder: Path) -> bool:
    """Return whether the newest weights of a run can be loaded and belong to its end."""
    steps = sorted((int(path.parent.name) for path in folder.glob("models/[0-9]*/agent.th")), reverse=True)
    if not steps or steps[0] < 120:
        return False
    return finite(folder / "models" / str(steps[0]) / "agent.th")


def finite(path: Path) -> bool:
    """Return whether a file can be loaded and every number in it is finite."""

    def numbers(value: Any) -> Iterator[torch.Tensor]:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, dict):
            for item in value.values():
                yield from numbers(item)
        elif isinstance(value, (list, tuple)):
            for item in value:
                yield from numbers(item)

    state = torch.load(path, weights_only=True)
    return all(bool(torch.isfinite(tensor).all()) for tensor in numbers(state) if tensor.is_floating_point())


def _spoil(variant: str, where: str, value: float, at: int, always: bool) -> None:
    """Let the game of a variant return `value` once in one field, at its step `at`, or from then on."""
    from omagd.envs.sanity import MatrixGame, MemoryGame

    game: Any = MatrixGame if variant == "matrix game" else MemoryGame
    step, observe, count = game.step, game.observe, [0]

    def due() -> bool:
        return count[0] >= at if always else count[0] == at

    def spoiled_step(self: Any, actions: np.ndarray, active: np.ndarray) -> Any:
        count[0] += 1
        result = step(self, actions, active)
        if where == "reward" and due():
            with np.errstate(all="ignore"):
                result.reward[int(np.flatnonzero(active)[0])] = value
        return result

    def spoiled_observe(self: Any, full: bool = False) -> Any:
        seen = observe(self, full)
        if due():
            with np.errstate(all="ignore"):
                if where == "obs":
                    seen.obs.flat[0] = value
                elif where == "state":
                    seen.state.flat[0] = value
                elif where == "avail":
                    seen.avail_actions[0, 0] = False
        return seen

    game.step, game.observe = spoiled_step, spoiled_observe


def plant(run: Path, outside: Path, rng: random.Random) -> str:
    """Replace something of a run's folder by a link to something outside; return what was done."""
    how = rng.choice(["file", "file", "folder", "folder", "run", "hard", "new", "name"])
    entries = sorted(p for p in run.rglob("*") if not p.is_symlink())
    files, folders = [p for p in entries if p.is_file()], [p for p in entries if p.is_dir()]
    if how == "run":
        target = outside / "run"
        run.rename(target)
        run.symlink_to(target)
        return "the run's folder is a link"
    if how == "name":
        named = run.with_name("x\x1b[31m\nerror: injected=$(touch pwned)")
        run.rename(named)
        (named / "lock").unlink(missing_ok=True)
        (named / "lock").symlink_to(outside / "file")
        return "a name with control characters, its lock a link"
    if how == "folder":
        path = rng.choice(folders)
        shutil.rmtree(path)
        path.symlink_to(outside / "folder", target_is_directory=True)
    elif how == "new":
        path = rng.choice(
            [
                run / "models" / "999999",
                run / "checkpoints" / "99999999",
                run / "plots" / "curves.png",
                run / "episodes" / "rank_7.jsonl",
            ]
        )
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_symlink() or path.exists():
            path.unlink() if not path.is_dir() else shutil.rmtree(path)
        path.symlink_to(outside / ("folder" if path.suffix == "" else "file"))
    else:
        path = rng.choice(files)
        path.unlink()
        if how == "hard":
            os.link(outside / "file", path)
        else:
            path.symlink_to(outside / "file")
    return f"{path.relative_to(run)} is a {'hard ' if how == 'hard' else ''}link"
