"""A process that starts the commands of a test session, for all of its pytest processes.

`python src/main.py …` is forked from here, where its packages are loaded already: that saves each command some seconds
and changes nothing else (arguments, variables, folder, session and exit code are its own), except that pictures of
curves are empty. With `FORK_RANKS` in its environment its ranks are forked too. So is `ddp_harness.py`. Every other
command is executed as it is. Linux only.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import traceback
import uuid
from pathlib import Path
from typing import Any

MAIN = str(Path(__file__).resolve().parents[1] / "src" / "main.py")
RANKS = str(Path(__file__).resolve().with_name("ddp_harness.py"))
SCRIPTS = ([MAIN], [RANKS])
ADDRESS = "OMAGD_TEST_COMMANDS"  # variable: the name of the server's socket, which is no file
LONGEST = 1 << 20
# What a command that was started with other values of these would see must be read when Python or torch starts.
FORK_RANKS = "OMAGD_TEST_FORK_RANKS"
READ_AT_START = ("PYTHON", "OMP_", "MKL_", "LD_", "CUDA_", "MALLOC_", "TORCH_")
_ours: list[subprocess.Popen[bytes]] = []


class Command:
    """A running command, with the interface of subprocess.Popen as far as tests use it.

    Args:
        command: as typed. cwd: where. env: its whole environment. Output is collected as text.
    """

    def __init__(self, command: list[str], cwd: Path, env: dict[str, str]) -> None:
        self._out, out = os.pipe()
        self._err, err = os.pipe()
        self._status, status = os.pipe()
        request = json.dumps({"command": command, "cwd": str(cwd), "env": env}).encode()
        if ADDRESS not in os.environ:  # without the conftest.py of this folder
            share()
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
            connection.connect("\0" + os.environ[ADDRESS])
            socket.send_fds(connection, [request], [out, err, status])
            self.pid = int(connection.recv(LONGEST))
        for end in (out, err, status):
            os.close(end)
        self.returncode: int | None = None
        self._text = {self._out: b"", self._err: b""}
        self._open = {self._out, self._err}

    def poll(self) -> int | None:
        """Return the exit code, negative for a signal; None while it runs."""
        return self._wait_for_status(0.0)

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end without reading the output. Errors: subprocess.TimeoutExpired."""
        code = self._wait_for_status(timeout)
        if code is None:
            raise subprocess.TimeoutExpired("command", timeout or 0.0)
        return code

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Collect the output until all who can write it have ended. Errors: subprocess.TimeoutExpired."""
        until = None if timeout is None else time.monotonic() + timeout
        while self._open:
            left = None if until is None else max(0.0, until - time.monotonic())
            ready, _, _ = select.select(list(self._open), [], [], left)
            if not ready:
                out, err = self._text[self._out], self._text[self._err]
                raise subprocess.TimeoutExpired("command", timeout or 0.0, out, err)
            for end in ready:
                part = os.read(end, 65536)
                self._text[end] += part
                if not part:
                    os.close(end)
                    self._open.discard(end)
        self.wait(None if until is None else max(0.0, until - time.monotonic()))
        return self._text[self._out].decode(errors="replace"), self._text[self._err].decode(errors="replace")

    def _wait_for_status(self, timeout: float | None) -> int | None:
        if self.returncode is None and select.select([self._status], [], [], timeout)[0]:
            status = os.read(self._status, 8)
            os.close(self._status)
            self.returncode = struct.unpack("i", status)[0] if status else -signal.SIGKILL  # the server was killed
        return self.returncode


def share() -> None:
    """Start a server for this process and those that inherit its environment; it ends with this process."""
    os.environ[ADDRESS] = f"omagd-{uuid.uuid4().hex}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listening:
        listening.bind("\0" + os.environ[ADDRESS])
        listening.listen()
        _ours.append(subprocess.Popen(
            [sys.executable, __file__, str(listening.fileno())], pass_fds=[listening.fileno()], stdin=subprocess.PIPE,
            env={**os.environ, "OMP_NUM_THREADS": "1"}, start_new_session=True,
        ))  # fmt: skip


def load() -> None:
    """Import what all runs need; not before one is asked for."""
    import omagd.run.cli.trial
    import omagd.run.reporting.sacred_record
    import omagd.run.run  # noqa: F401
    from omagd.envs.battle.skirmish_env import SkirmishEnv
    from omagd.run.launch.processes import MODULES

    for name in MODULES:
        importlib.import_module(name)
    SkirmishEnv.engine()  # loads its kernels
    gc.freeze()  # else the first collection in each command copies all memory of this process


def serve(listening: socket.socket) -> None:
    """Start what is asked for until the session is over; `reaper.py` ends what still runs then."""
    at_start = _read_at_start(dict(os.environ))
    running: dict[int, tuple[int, int]] = {}  # pidfd -> process id, where its exit code goes
    while True:
        for ready in select.select([sys.stdin, listening, *running], [], [])[0]:
            if ready is sys.stdin:
                return
            if ready is not listening:
                _report(ready, *running.pop(ready))
                continue
            connection, _ = listening.accept()
            request, ends, _, _ = socket.recv_fds(connection, LONGEST, 3)
            asked = json.loads(request)
            if warm := asked["command"][1:2] in SCRIPTS and _read_at_start(asked["env"]) == at_start:
                load()
            pid = os.fork()
            if pid == 0:
                listening.close()
                for pidfd, (_, status) in running.items():
                    os.close(pidfd)
                    os.close(status)
                _become(asked, ends, warm)
            running[os.pidfd_open(pid)] = (pid, ends[2])
            for end in ends[:2]:
                os.close(end)
            with connection:
                connection.send(str(pid).encode())


def _read_at_start(env: dict[str, str]) -> dict[str, str]:
    given = {name: value for name, value in env.items() if name.startswith(READ_AT_START)}
    return {name: value for name, value in given.items() if name not in {"PYTHON", "PYTHONPATH"}}


def _report(pidfd: int, pid: int, end: int) -> None:
    _, status = os.waitpid(pid, 0)
    os.close(pidfd)
    with contextlib.suppress(BrokenPipeError):
        os.write(end, struct.pack("i", os.waitstatus_to_exitcode(status)))
    os.close(end)


def _become(asked: dict[str, Any], ends: list[int], warm: bool) -> None:
    """Be the command: execute it, or run `src/main.py` or `ddp_harness.py` in this process."""
    os.setsid()
    for number, end in enumerate((os.open(os.devnull, os.O_RDONLY), *ends[:2])):
        os.dup2(end, number)
    for end in ends:
        os.close(end)
    try:
        os.chdir(asked["cwd"])
        command, env = asked["command"], asked["env"]
        if not (warm and command[0] == sys.executable):
            signal.signal(signal.SIGPIPE, signal.SIG_DFL)
            os.execvpe(command[0], command, env)
        os.environ.clear()
        os.environ.update(env)
        sys.argv, sys.path[0] = command[1:], str(Path(command[1]).parent)
        sys.path[1:1] = [entry for entry in env.get("PYTHONPATH", "").split(os.pathsep) if entry not in {"", *sys.path}]
        from omagd.run.launch import processes

        processes.STARTED_BY = os.getppid()
        if env.get(FORK_RANKS):
            processes.start_method, processes.preload = lambda: "fork", lambda config: None
        runpy.run_path(command[1], run_name="__main__")
        code: Any = 0
    except SystemExit as end_of_main:
        code = end_of_main.code
    except BaseException:  # noqa: BLE001 (as Python itself reports what escapes)
        traceback.print_exc()
        code = 1
    if isinstance(code, str):
        sys.stderr.write(code + "\n")
    _end((code or 0) if isinstance(code, int) or code is None else 1)


def _end(code: int) -> None:
    """End as Python does, but take no module apart: that would copy all memory of the process this one is forked of."""
    threading._shutdown()  # type: ignore[attr-defined]  # waits for threads
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # nobody reads, or it is closed
            stream.flush()
    os._exit(code & 0xFF)


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])))
