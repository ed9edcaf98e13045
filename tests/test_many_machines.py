"""Two hosts on one machine: network namespaces with an address each and a cable between them that can be pulled.

By hand: `sudo python -m pytest tests/test_many_machines.py -v` (a test that needs namespaces says so where it may not).
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from command_budgets import BUDGETS
from command_harness import ROOT, Started, left_behind, records, run_command, run_folders, summary_of
from ddp_harness import run_ranks

from omagd.run.launch import group
from omagd.run.launch.group import require_shared_folder
from omagd.utils.dist_utils import Dist
from omagd.utils.errors import UserError

NETWORK = "10.213.77"
RUN = ("--gpus", "1", "--config", "qmix", "--env-config", "skirmish", "env_args.map_name=3m", *BUDGETS)


def look(rank: int, dist: Dist, paths: list[list[str]]) -> list[str]:
    """Return the error that this rank gets for each folder, empty if there is none."""
    group.WAITS, errors = (0.0, 0.1), []
    for case in paths:
        try:
            require_shared_folder(dist, case[rank])
            errors.append("")
        except UserError as error:
            errors.append(error.message)
    return errors


@pytest.mark.processes
def test_a_folder_that_is_not_shared_is_refused_on_all_ranks_by_name(tmp_path):
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
    one, other, missing = (str(tmp_path / name) for name in ("one", "other", "missing"))
    errors = run_ranks(look, [[one, one], [one, other], [one, missing], [missing, missing]])
    assert errors[0] == errors[1]
    shared, apart, gone, nowhere = errors[0]
    assert shared == ""
    for text in (apart, gone):
        assert "local_results_path" in text and one in text
        assert f"is not rank 0's on host {socket.gethostname()}" in text
    assert "cannot be written" in nowhere
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
    require_shared_folder(Dist(), tmp_path / "missing")  # one rank needs none


@pytest.mark.processes
def test_the_quick_test_passes_and_fails(tmp_path):
    """On this machine it passes; with a host that is not there it says that it failed."""
    command = [str(ROOT / "scripts" / "quick_distributed_test.sh"), "--master-port", str(free_port())]
    ended = run_command(command, tmp_path, TMPDIR=str(tmp_path))
    *lines, verdict = ended.out.splitlines()
    assert re.fullmatch(r"PASS in \d+ s", verdict)
    assert [line for line in lines if not line.startswith("ok ")] == []
    assert all(word in ended.out for word in ("2 ranks (gloo)", "MB/s", " ms", "updates on 2 ranks"))
    assert [path.name for path in tmp_path.iterdir() if not path.name.startswith("torchinductor_")] == []
    broken = {"PYTHON": str(stand_in(tmp_path)), "TMPDIR": str(tmp_path)}
    failed = Started(command, tmp_path, **broken).wait(60)
    assert failed.code == 1
    assert "FAIL after" in failed.out


def stand_in(folder: Path) -> Path:
    """Return a Python whose torchrun never finds anybody."""
    path = folder / "python"
    path.write_text('#!/usr/bin/env bash\n[ "$1" = -c ] && echo 0 || { echo "no route to host" >&2; exit 1; }\n')
    path.chmod(0o755)
    return path


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Hosts:
    """Two network namespaces and the cable between them."""

    def __init__(self, tag: str) -> None:
        self.names = [f"omagd{tag}{number}" for number in (0, 1)]
        self.ends = [f"o{tag}{number}" for number in (0, 1)]

    def build(self) -> None:
        """Make them. Errors: CalledProcessError where that is not permitted."""
        for name in self.names:
            ip("netns", "add", name)
        ip("link", "add", self.ends[0], "type", "veth", "peer", "name", self.ends[1])
        for number, (name, end) in enumerate(zip(self.names, self.ends, strict=True)):
            ip("link", "set", end, "netns", name)
            ip("-n", name, "addr", "add", f"{NETWORK}.{number + 1}/24", "dev", end)
            ip("-n", name, "link", "set", "lo", "up")
            ip("-n", name, "link", "set", end, "up")

    def remove(self) -> None:
        for name in self.names:
            subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)

    def cable(self, state: str) -> None:
        """Pull the cable of the second host ("down"), or plug it in ("up")."""
        ip("-n", self.names[1], "link", "set", self.ends[1], state)

    def launch(self, cwd: Path, port: int, *words: str) -> list[Started]:
        """Type launch.sh on both."""
        given = ("--nodes", "2", "--master-addr", f"{NETWORK}.1", "--master-port", str(port))
        return [
            Started(
                ["ip", "netns", "exec", name, str(ROOT / "launch.sh"), *given, "--node-rank", str(rank), *RUN, *words],
                cwd,
            )
            for rank, name in enumerate(self.names)
        ]


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    """Return two hosts, or skip where namespaces may not be made."""
    if sys.platform != "linux" or shutil.which("ip") is None:
        pytest.skip("needs Linux and the program `ip` (iproute2)")
    made = Hosts(str(os.getpid() % 100000))
    try:
        made.build()
    except subprocess.CalledProcessError as refusal:
        made.remove()
        pytest.skip(f"network namespaces may not be made here (as root they may): {refusal.stderr.decode().strip()}")
    yield made
    made.remove()


def wait_for(what, seconds: float, started: list[Started]) -> None:
    """Wait until `what()` is true; fail with what the launchers said where one has ended or the time is over."""
    until = time.monotonic() + seconds
    while not what():
        if time.monotonic() > until or any(one.process.poll() is not None for one in started):
            for one in started:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(one.group, signal.SIGTERM)
            texts = [one.wait(40).text[-3000:] for one in started]
            raise AssertionError("\n=====\n".join(["it never came", *texts]))
        time.sleep(0.1)


@pytest.mark.processes
def test_two_hosts_train_like_two_ranks_of_one_host_though_the_network_fails_for_a_while(hosts, tmp_path):
    """Ranks that hear nothing end, are restarted by torchrun and resume.

    The log of training equals that of two spawned ranks without a failure.
    """
    there, here = tmp_path / "there", tmp_path / "here"
    there.mkdir(), here.mkdir()
    length = ("t_max=1000", "epsilon_anneal_time=1000")
    words = (*length, "--max-restarts", "2", "dist_timeout_minutes=0.05", "checkpoint_interval=0")
    words += ("distributed_debug=True",)
    together = Started([str(ROOT / "launch.sh"), "--debug", "--gpus", "2", *RUN[2:], *length], here)
    started = hosts.launch(there, 29613, *words)
    wait_for(lambda: checkpoints(there), 120, started)
    (folder,) = run_folders(there)
    hosts.cable("down")
    try:
        time.sleep(5)
        reached = newest(folder)
    finally:
        hosts.cable("up")
    both = [one.wait(120) for one in started]
    assert [ended.code for ended in both] == [0, 0], "\n".join(ended.text[-2000:] for ended in both)
    assert run_folders(there) == {folder}
    assert (summary_of(folder)["exit_state"], summary_of(folder)["world_size"]) == ("completed", 2)
    clock = [line["t_env"] for line in records(folder)]
    assert clock == sorted(set(clock)) and clock[-1] >= 1000 and reached > 0
    alone = together.wait()
    assert (alone.code, left_behind(alone.group)) == (0, []), alone.text
    (undisturbed,) = run_folders(here)
    assert learned(folder) == learned(undisturbed)
    assert sorted(path.name for path in (folder / "logs").iterdir()) == ["rank_0.log", "rank_1.log"]
    logs = sorted((there / "results" / "logs").iterdir())
    names = sorted(re.sub(r"\d{8}_\d{6}", "DATE", log.name) for log in logs)
    assert names == [f"launch_DATE_node{rank}.log" for rank in (0, 1)]
    assert "results:" in "".join(log.read_text() for log in logs if log.name.endswith("node0.log"))


def learned(folder: Path) -> list[dict]:
    """Return what the log says of the learning, not of the machine."""
    names = ("stage", "t_env", "episode", "updates", "loss_td", "grad_norm", "return_mean", "test_return_mean")
    found = [{name: line.get(name) for name in names} for line in records(folder)]
    assert any(line["loss_td"] is not None for line in found)
    return found


def checkpoints(cwd: Path) -> list[Path]:
    return list(cwd.glob("results/*/checkpoints/[0-9]*/manifest.json"))


def newest(folder: Path) -> int:
    """Return the iteration of the newest checkpoint of a run."""
    return max((int(path.parent.name[:8]) for path in folder.glob("checkpoints/[0-9]*/manifest.json")), default=0)
