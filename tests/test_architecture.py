"""The reading lists of docs/architecture.md: the files exist, and they are those that run."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from types import CodeType

import pytest
from test_structure import house

from omagd.learners.nq_learner import NQLearner
from omagd.run.checkpoint.checkpointer import Checkpointer
from omagd.run.cli.main import main
from omagd.run.training import experiment
from omagd.run.training.stages.rl import RLStage

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
KERNELS = "src/modules/kernels/"
COMMAND = (
    "--unobserved --config=qmix --env-config=skirmish with env_args.map_name=3m use_cuda=False batch_size_run=16"
    " buffer_size=64 t_max=1500 test_nepisode=16 checkpoint_interval=0"
)


def listed(title: str) -> list[str]:
    """Return the files of the numbered list under a heading, in order."""
    section = PAGE.split(f"## {title}\n", 1)[1].split("\n## ", 1)[0]
    return re.findall(r"^\d\. `([\w./]+)`", section, re.MULTILINE)


def sources(codes: Iterable[CodeType]) -> list[str]:
    """Return the files of this package that the code is from, as paths in the repository, in order."""
    files = dict.fromkeys(Path(code.co_filename) for code in codes)
    return [path.relative_to(ROOT).as_posix() for path in files if path.is_relative_to(ROOT / "src")]


def test_the_map_names_every_module_and_nothing_else():
    """Of the packages that it lists, without the second names of learners for several ranks."""
    words, missing = set(re.findall(r"[a-z]\w+", PAGE.split("```")[1])), []
    there = {path.stem for path in (ROOT / "src").rglob("*") if "__" not in path.name}
    assert words - there <= {"src", "py", "yaml", "fit", "stage"}
    assert {path.parent.name for path in (ROOT / "src").glob("*/__init__.py")} <= words
    for package in ("lab", "run", "resident", "learners", "runners", "controllers", "components"):
        for path in sorted((ROOT / "src" / package).rglob("*.py")):
            inside = {"compiled"} & {path.parent.name}  # a package that is named as a whole
            if not inside and path.stem != "__init__" and not path.stem.endswith("_ddp") and path.stem not in words:
                missing.append(path.relative_to(ROOT).as_posix())
    assert missing == []


@pytest.mark.processes
def test_a_plain_run_loads_nothing_of_lab_and_not_torchs_compiler(tmp_path):
    code = "import sys; from omagd.run.cli.main import main; print(main(sys.argv[1:])); print(*sys.modules)"
    command = [sys.executable, "-c", code, *COMMAND.split(), "t_max=16", f"local_results_path={tmp_path}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    modules = done.stdout.splitlines()[-1].split()
    assert "omagd.learners.nq_learner" in modules and "torch._dynamo" not in modules
    assert [name for name in modules if "omagd.lab" in name] == []
    assert sum(name.startswith("omagd") for name in modules) <= house.LIMITS[house.MODULES][0]


@pytest.fixture
def executed(tmp_path) -> dict[str, list[str] | set[str]]:
    """Run a small training; return the files of an update and of checkpoints, and the call chain to the loop."""
    codes: dict[str, set[CodeType]] = {"update": set(), "rollout": set(), "checkpoint": set()}
    chain: list[CodeType] = []

    def noted(name: str, method: Callable) -> Callable:
        def note(frame, event, _):
            if event == "call":
                codes[name].add(frame.f_code)

        def call(*args, **kwargs):
            if name == "update" and not args[0].updates:  # the first one loads the kernels
                return method(*args, **kwargs)
            old = sys.getprofile()
            sys.setprofile(note)
            threading.setprofile(note)  # the thread that writes checkpoints starts within
            try:
                return method(*args, **kwargs)
            finally:
                sys.setprofile(old)
                threading.setprofile(None)

        return call

    def fit(stage):
        frame = sys._getframe(1)
        while frame is not None:
            chain.insert(0, frame.f_code)
            frame = frame.f_back
        return loop(stage)

    loop = experiment.fit
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(NQLearner, "update", noted("update", NQLearner.update))
        patch.setattr(RLStage, "collect", noted("rollout", RLStage.collect))
        for name in ("boundary", "restore"):
            patch.setattr(Checkpointer, name, noted("checkpoint", getattr(Checkpointer, name)))
        patch.setattr(experiment, "fit", fit)
        assert main([*COMMAND.split(), f"local_results_path={tmp_path}"]) == 0
    # The page names the folder of kernels, and nothing is hidden.
    updated = {KERNELS if path.startswith(KERNELS) else path for path in sources(codes["update"])}
    # Files of run/checkpoint/ that run when nothing is resumed.
    saved = {path for path in sources(codes["checkpoint"]) if path.startswith("src/run/checkpoint/")}
    return {
        "One QMIX update": updated, "One rollout": set(sources(codes["rollout"])), "One checkpoint": saved,
        "One launch": ["src/main.py", *sources(chain), "src/run/training/loop.py"],
    }  # fmt: skip


def test_the_reading_lists_name_the_files_that_run(executed):
    lists = {title: listed(title) for title in executed}
    assert [title for title, files in lists.items() if not 4 <= len(files) <= 8] == []
    assert executed["One launch"] == lists["One launch"]  # in the order of the calls
    assert f"also enters `{KERNELS}`" in PAGE and executed["One QMIX update"] == {*lists["One QMIX update"], KERNELS}
    assert {path for path in lists["One rollout"] if "/envs/" not in path} <= executed["One rollout"]
    assert executed["One checkpoint"] == set(lists["One checkpoint"][1:3])
