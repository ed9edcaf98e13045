"""Runs that are interrupted at a chosen iteration, copies of one, ways to damage it, and stages without a launcher."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import torch

from omagd.config.schema import Config
from omagd.run.checkpoint import checkpointer
from omagd.run.checkpoint.checkpointer import Checkpointer
from omagd.run.checkpoint.recovery import ResumePlan, recover
from omagd.run.checkpoint.resuming import RunLock, locked_folder
from omagd.run.checkpoint.store import sealed
from omagd.run.cli.main import config_from, main
from omagd.run.launch.launcher import launch
from omagd.run.reporting.card import is_of, read_card
from omagd.run.run_folder import RunFolder
from omagd.run.training.build import build_session
from omagd.run.training.stages.base import PretrainedModules, Stage
from omagd.run.training.stages.rl import RLStage
from omagd.utils.dist_utils import Dist
from omagd.utils.logging import Logger, setup_logging

COMMAND = (
    "--config=qmix", "--env-config=matrix_game", "with", "run=default", "use_cuda=False", "batch_size_run=2",
    "batch_size=4", "buffer_size=6", "t_max=40", "updates_per_iteration=1", "rnn_hidden_dim=8", "mixing_embed_dim=4",
    "hypernet_embed=4", "test_nepisode=2", "test_interval=20", "log_interval=4", "runner_log_interval=4",
    "learner_log_interval=4", "absolute_episodes=4", "save_model_interval=20", "checkpoint_interval=0",
    "auto_resume=True",
)  # fmt: skip
SAVED_AT = 11
"""Iteration of the newest checkpoint of `torn`."""


class Interrupted(Exception):
    """Ends a run."""


def wait_for_saves(patch: pytest.MonkeyPatch, then: Callable[[Checkpointer], object] = id) -> None:
    """Let each iteration begin with the save before it complete, then call `then`."""
    ask = Checkpointer.ask

    def complete(self: Checkpointer) -> None:
        self.finish()
        then(self)
        ask(self)

    patch.setattr(Checkpointer, "ask", complete)


def interrupted_run(config: Config, iteration: int) -> tuple[RunFolder, Stage | None]:
    """Run until `iteration`, with the last save complete. Return its folder and stage."""
    stages: list[Stage | None] = []

    def interrupt(checkpointer: Checkpointer) -> None:
        if checkpointer.iteration == iteration:
            stages.append(checkpointer.stage)
            raise Interrupted

    with pytest.MonkeyPatch.context() as patch:
        wait_for_saves(patch, interrupt)
        with pytest.raises(Interrupted):
            launch(config, "run")
    (folder,) = [path.parent for path in Path(config.local_results_path).glob("*/run.json")]
    return RunFolder(folder), stages[0]


@contextmanager
def unfinished(config: Config, token: str = "run") -> Iterator[RunLock]:
    """Lock the folder of a run, and leave the run unfinished."""
    with suppress(Interrupted), locked_folder(config, token) as lock:
        yield lock
        raise Interrupted


def stage_of(config: Config, folder: Path, dist: Dist | None = None) -> RLStage:
    """Return stage 3 of one rank in a run's folder, without a launcher."""
    logger = Logger(setup_logging(None, rank=1), minimal=True)
    return RLStage(build_session(config, dist or Dist(), RunFolder(folder), logger), PretrainedModules())


class TornRun(RunFolder):
    """The folder of an unfinished run of `COMMAND`."""

    @property
    def checkpoint_folders(self) -> list[Path]:
        """The newest one first."""
        return sorted(self.checkpoints.glob("[0-9]*"), reverse=True)

    @property
    def resumed(self) -> list[dict]:
        """The card's entries of starts that continued the run."""
        return json_of(self.card_json)["resumed"]

    def copy(self, place: Path) -> TornRun:
        return TornRun(shutil.copytree(self.path, place / "results" / self.path.name))

    def start(self, *words: str, results: Path | None = None) -> int:
        """Start the command again; return the exit code."""
        torch.set_num_threads(1)
        return main(["-u", *COMMAND, f"local_results_path={results or self.path.parent}", *words])

    def continue_until(self, iteration: int) -> None:
        """Continue until the checkpoint of an iteration is complete."""
        torch.set_num_threads(1)
        interrupted_run(config_from([*COMMAND, f"local_results_path={self.path.parent}"]), iteration)

    def rejected(self, capsys: pytest.CaptureFixture[str], *words: str) -> str:
        """Return the one line of a start that is rejected and changes nothing."""
        before = self.contents()
        capsys.readouterr()
        assert self.start(*words) == 2
        (line,) = [line for line in capsys.readouterr().err.splitlines() if not line.startswith("[")]
        assert self.contents() == before
        assert line.startswith("error: ")
        return line

    def contents(self) -> dict[str, bytes]:
        """Return all files but the locks, by their relative path."""
        files = [path for path in self.path.rglob("*") if path.is_file() and "lock" not in path.name]
        return {str(path.relative_to(self.path)): path.read_bytes() for path in files}

    def assert_kept(self, before: dict[str, bytes], *beginnings: str) -> None:
        """Fail if a file of `before`, whose path has one of the beginnings, is neither here nor set aside."""
        for name, content in before.items():
            places = [self.path / name, *(aside / name for aside in self.path.glob("set_aside/*"))]
            found = [path.read_bytes() for path in places if path.exists()]
            assert not name.startswith(beginnings) or any(each.startswith(content) for each in found), name

    def change_part(self, part: str, change: Callable[[dict], object]) -> None:
        """Change a part of the newest checkpoint and write checksums that fit."""
        path = self.checkpoint_folders[0] / f"{part}.th"
        state = torch.load(path, weights_only=True)
        change(state)
        entry = {f"{path.parent.name}/{path.name}": checkpointer.write_part(path, state)}
        change_manifest(path.parent, files=manifest_of(path.parent)["files"] | entry)


def plan_of(folder: RunFolder, *words: str, dist: object = None) -> ResumePlan:
    """Return what a start with `COMMAND` would continue from."""
    dist = dist or Dist()
    as_before = is_of(read_card(folder.path), dist.world_size)
    return recover(folder, dist, config_from([*COMMAND, *words]), as_before)


def json_of(path: Path) -> dict:
    return json.loads(path.read_text())


def manifest_of(checkpoint: Path) -> dict:
    return json_of(checkpoint / "manifest.json")


def change_manifest(checkpoint: Path, **changes: object) -> None:
    """Change a manifest and write a checksum that fits."""
    (checkpoint / "manifest.json").write_text(json.dumps(sealed({**manifest_of(checkpoint), **changes})))


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0x10
    path.write_bytes(bytes(content))
