"""A process that starts the commands of one pytest process.

`python src/main.py …` is forked from here, where its packages are loaded already: that saves each command some seconds
and changes nothing else (arguments, variables, folder, session and exit code are its own), except that pictures of
curves are empty. With `FORK_RANKS` in its environment its ranks are forked too. Every other command is executed as it
is. Linux only.
"""

from __future__ import annotations

import contextlib
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
import time
import traceback
from functools import cache
from pathlib import Path
from typing import Any

MAIN = str(Path(__file__).resolve().parents[1] / "src" / "main.py")
LONGEST = 1 << 20
# What a command that was started with other values of these would see must be read when Python or torch starts.
FORK_RANKS = "OMAGD_TEST_FORK_RANKS"
READ_AT_START = ("PYTHON", "OMP_", "MKL_", "LD_", "CUDA_", "MALLOC_", "TORCH_")


class Command:
    """A running command, with the interface of subprocess.Popen as far as tests use it.

    Args:
        command: as typed. cwd: where. env: its whole environment. Output is collected as text.
    """

    def __init__(self, command: list[str], cwd: Path, env: dict[str, str]) -> None:
        self._out, out = os.pipe()
        self._err, err = os.pipe()
        self._status, status = os.pipe()
        _, connection = _server(os.getpid())
        request = json.dumps({"command": command, "cwd": str(cwd), "env": env}).encode()
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


@cache
def _server(owner: int) -> tuple[subprocess.Popen, socket.socket]:
    """Start the server of the process `owner`; return it and a connection to it."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for end in (ours, theirs):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, LONGEST)
    with theirs:
        server = subprocess.Popen(
            [sys.executable, __file__, str(theirs.fileno())], pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL,
            env={**os.environ, "OMP_NUM_THREADS": "1"}, start_new_session=True,
        )  # fmt: skip
    return server, ours


def serve(connection: socket.socket) -> None:
    """Start what is asked for until the other side is gone; `reaper.py` ends what still runs then."""
    import omagd.run.reporting.sacred_record  # noqa: F401 (imported here once, for all commands)
    from omagd.envs.battle.skirmish_env import SkirmishEnv
    from omagd.run.launch.processes import MODULES

    for name in MODULES:
        importlib.import_module(name)
    SkirmishEnv.engine()  # loads its kernels

    at_start = _read_at_start(dict(os.environ))
    running: dict[int, tuple[int, int]] = {}  # pidfd -> process id, where its exit code goes
    while True:
        for ready in select.select([connection, *running], [], [])[0]:
            if ready is not connection:
                _report(ready, *running.pop(ready))
                continue
            request, ends, _, _ = socket.recv_fds(connection, LONGEST, 3)
            if not request:
                return
            asked = json.loads(request)
            pid = os.fork()
            if pid == 0:
                connection.close()
                for pidfd, (_, status) in running.items():
                    os.close(pidfd)
                    os.close(status)
                _become(asked, ends, warm=_read_at_start(asked["env"]) == at_start)
            running[os.pidfd_open(pid)] = (pid, ends[2])
            for end in ends[:2]:
                os.close(end)
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
    """Be the command: execute it, or run `src/main.py` in this process."""
    os.setsid()
    for number, end in enumerate((os.open(os.devnull, os.O_RDONLY), *ends[:2])):
        os.dup2(end, number)
    for end in ends:
        os.close(end)
    try:
        os.chdir(asked["cwd"])
        command, env = asked["command"], asked["env"]
        if not (warm and command[0] == sys.executable and command[1:2] == [MAIN]):
            signal.signal(signal.SIGPIPE, signal.SIG_DFL)
            os.execvpe(command[0], command, env)
        os.environ.clear()
        os.environ.update(env)
        sys.argv, sys.path[0] = command[1:], str(Path(MAIN).parent)
        sys.path[1:1] = [entry for entry in env.get("PYTHONPATH", "").split(os.pathsep) if entry not in {"", *sys.path}]
        from omagd.run.launch import processes

        processes.STARTED_BY = os.getppid()
        if env.get(FORK_RANKS):
            processes.start_method, processes.preload = lambda: "fork", lambda config: None
        runpy.run_path(MAIN, run_name="__main__")
        code: Any = 0
    except SystemExit as end_of_main:
        code = end_of_main.code
    except BaseException:  # noqa: BLE001 (as Python itself reports what escapes)
        traceback.print_exc()
        code = 1
    if isinstance(code, str):
        sys.stderr.write(code + "\n")
    sys.exit(code if isinstance(code, int) or code is None else 1)


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])))
