"""Two hosts on one machine: network namespaces with an address each, and a cable between them that can be pulled.

By hand: `sudo python -m pytest tests/test_many_machines.py -v` (skipped where namespaces are forbidden).
"""

from __future__ import annotations

import os
import re
import runpy
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from command_budgets import BUDGETS
from command_harness import (
    FORKED,
    MAIN,
    PYTHON,
    ROOT,
    Started,
    left_behind,
    records,
    run_command,
    run_folders,
    summary_of,
)
from ddp_harness import run_ranks
from sockets import free_port, wait_until

from omagd.run.cli.main import config_from
from omagd.run.launch import watchdog as group
from omagd.run.launch.watchdog import require_shared_folder
from omagd.utils.dist_utils import Dist
from omagd.utils.errors import UserError

NETWORK = "10.213.77"
LENGTH = ("t_max=1000", "epsilon_anneal_time=1000")
RUN = ("--config", "qmix", "--env-config", "skirmish", "env_args.map_name=3m", *BUDGETS, *LENGTH)


def check_folders(rank: int, dist: Dist, cases: list[list[str]]) -> list[str]:
    """Return the error of this rank for each case of one folder per rank; empty if there is none."""
    group.WAITS, errors = (0.1, 0.0), []
    for case in cases:
        try:
            require_shared_folder(dist, case[rank])
            errors.append("")
        except UserError as error:
            errors.append(error.message)
    return errors


@pytest.mark.processes
def test_a_folder_that_is_not_shared_is_rejected_on_all_ranks(tmp_path):
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
    one, other, missing = (str(tmp_path / name) for name in ("one", "other", "missing"))
    errors, same = run_ranks(check_folders, [[one, one], [one, other], [one, missing], [missing, missing]])
    assert errors == same
    shared, *apart, nowhere = errors
    assert shared == "" and "cannot be written" in nowhere
    for text in apart:
        assert "local_results_path" in text and f"{one} is not rank 0's on host {socket.gethostname()}" in text
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
    require_shared_folder(Dist(), tmp_path / "missing")  # one rank needs none


def look(rank: int, dist: Dist, _: None) -> list[tuple[bool, str]]:
    return runpy.run_path(str(ROOT / "scripts" / "probe_ranks.py"))["look"](dist, "gloo")


@pytest.mark.processes
def test_ranks_look_at_their_connections():
    first, *others = run_ranks(look)
    assert all(right for right, _ in first) and [right for right, _ in first] == [right for right, _ in others[0]]
    assert all(words in str(first) for words in ("2 ranks (gloo)", "MB/s", " ms"))


# Stands in for Python: plays the probe and the training, which writes its results down; the last step is real.
PLAYER = f"""#!/usr/bin/env bash
case "$*" in
    -c*) echo 0 ;;
    *probe_ranks.py*) [ "${{FAILS:-}}" != probe ] && echo "ok    probe" || {{ echo "no route to host" >&2; exit 1; }} ;;
    *main.py*)
        printf '%s\\0' "$@" >"$CALLED"
        [ "${{FAILS:-}}" != training ] || exit 1
        for word in "$@"; do case $word in local_results_path=*) run=${{word#*=}}/run ;; esac; done
        mkdir -p "$run/logs" && touch "$run/logs/rank_0.log" "$run/logs/rank_1.log"
        echo '{{"exit_state": "completed", "world_size": 2, "updates": '"${{UPDATES:-7}}"'}}' >"$run/summary.json"
        echo "results: $run"
        ;;
    *) exec "{PYTHON}" "$@" ;;
esac
"""


def test_the_quick_test_passes_and_fails(tmp_path):
    command = [str(ROOT / "scripts" / "quick_distributed_test.sh"), "--master-port", str(free_port())]
    python, called = tmp_path / "python", tmp_path / "called"
    python.write_text(PLAYER)
    python.chmod(0o755)
    (tmp_path / "temporary").mkdir()
    given = {"PYTHON": str(python), "CALLED": str(called), "TMPDIR": str(tmp_path / "temporary")}
    *lines, verdict = run_command(command, tmp_path, **given).out.splitlines()
    assert re.fullmatch(r"PASS in \d+ s", verdict) and all(line.startswith("ok ") for line in lines)
    assert "7 updates on 2 ranks" in "\n".join(lines)
    words = [word for word in called.read_text().split("\0") if word][1:]
    config = config_from(words[words.index(next(word for word in words if word.endswith("main.py"))) + 1 :])
    assert (config.run, config.world_size, config.distributed_debug) == ("ddp", 2, True)
    for more in ({"FAILS": "probe"}, {"FAILS": "training"}, {"UPDATES": "0"}):
        failed = Started(command, tmp_path, **given, **more).wait(60)
        assert failed.code == 1 and "FAIL after" in failed.out, more
    assert list((tmp_path / "temporary").iterdir()) == []


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


@pytest.fixture(scope="module")
def hosts() -> Iterator[SimpleNamespace]:
    """Yield the namespaces of two hosts and the end of the second one's cable; skip where they are forbidden."""
    if sys.platform != "linux" or shutil.which("ip") is None:
        pytest.skip("needs Linux and the program `ip` (iproute2)")
    tag = os.getpid() % 100000
    names, ends = [f"omagd{tag}{number}" for number in (0, 1)], [f"o{tag}{number}" for number in (0, 1)]
    try:
        for name in names:
            ip("netns", "add", name)
        ip("link", "add", ends[0], "type", "veth", "peer", "name", ends[1])
        for number, (name, end) in enumerate(zip(names, ends, strict=True)):
            ip("link", "set", end, "netns", name)
            ip("-n", name, "addr", "add", f"{NETWORK}.{number + 1}/24", "dev", end)
            for device in ("lo", end):
                ip("-n", name, "link", "set", device, "up")
        yield SimpleNamespace(names=names, cable=("-n", names[1], "link", "set", ends[1]))
    except subprocess.CalledProcessError as refusal:
        pytest.skip(f"network namespaces are forbidden here (root may make them): {refusal.stderr.decode().strip()}")
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)


def learned(folder: Path) -> list[dict]:
    """Return the logged values that depend on the learning, not on the machine."""
    names = ("stage", "t_env", "episode", "updates", "loss_td", "grad_norm", "return_mean", "test_return_mean")
    found = [{name: line.get(name) for name in names} for line in records(folder)]
    assert any(line["loss_td"] is not None for line in found)
    return found


@pytest.mark.processes
def test_two_hosts_train_like_two_ranks_of_one_host_although_the_network_fails_for_a_while(hosts, tmp_path):
    """Ranks without a connection end, are restarted by torchrun and resume.

    The log of training equals that of two spawned ranks without a failure.
    """
    there, here = tmp_path / "there", tmp_path / "here"
    there.mkdir(), here.mkdir()
    two = ("run=ddp", "world_size=2", "distributed_debug=True")
    alone = Started([PYTHON, MAIN, *RUN[:4], "with", *RUN[4:], *two], here, **FORKED)
    words = ("--gpus", "1", "--nodes", "2", "--master-addr", f"{NETWORK}.1", "--master-port", "29613", *RUN)
    words += ("--max-restarts", "4", "dist_timeout_minutes=0.2", "checkpoint_interval=0", "distributed_debug=True")
    started = [
        Started(["ip", "netns", "exec", name, str(ROOT / "launch.sh"), "--node-rank", str(rank), *words], there)
        for rank, name in enumerate(hosts.names)
    ]

    def checkpoints() -> list[Path]:
        return list(there.glob("results/*/checkpoints/[0-9]*/manifest.json"))

    wait_until(lambda: checkpoints() or any(one.process.poll() is not None for one in started), 120)
    ip(*hosts.cable, "down")
    try:
        # Until they have noticed, however busy the machine is.
        assert wait_until(lambda: any("rror: " in log.read_text() for log in there.glob("results/logs/*.log")), 120)
        reached = max((int(path.parent.name[:8]) for path in checkpoints()), default=0)
    finally:
        ip(*hosts.cable, "up")
    for one in started:
        ended = one.wait(120)
        assert ended.code == 0 and reached > 0, ended.text[-3000:]
    (folder,), ended = run_folders(there), alone.wait()
    assert (ended.code, left_behind(ended.group)) == (0, []), ended.text
    assert (summary_of(folder)["exit_state"], summary_of(folder)["world_size"]) == ("completed", 2)
    clock = [line["t_env"] for line in records(folder)]
    assert clock == sorted(set(clock)) and clock[-1] >= 1000
    assert [learned(folder)] == [learned(undisturbed) for undisturbed in run_folders(here)]
    assert sorted(path.name for path in (folder / "logs").iterdir()) == ["rank_0.log", "rank_1.log"]
    logs = {log.name[-9:]: log for log in (there / "results" / "logs").iterdir()}
    assert sorted(logs) == ["node0.log", "node1.log"] and "results:" in logs["node0.log"].read_text()
