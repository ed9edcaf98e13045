"""At the first start on a machine, a second process compiles what a run needs later, while the run compiles battles."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
from contextlib import suppress

from omagd.utils import compiling

PR_SET_PDEATHSIG = 1
MAIN = "import json, sys; sys.path[:] = json.loads(sys.argv[2]); from omagd.run.training.ahead import main; main()"
_started: list[subprocess.Popen[bytes]] = []  # not waited for: who needs its kernels first waits for their lock


def compile_ahead() -> None:
    """Compile the kernels of learning and acting in another process as soon as this one has to compile any others.

    It dies with this process, on Linux; elsewhere, and where there is one core only, nothing is done.
    """
    if sys.platform == "linux" and len(os.sched_getaffinity(0)) > 1:
        compiling.when_compiling(_start)


def _start() -> None:
    # With the path of this process: else modules in the working directory come first, which may have any name.
    path = json.dumps([place for place in sys.path if isinstance(place, str)])
    command = [sys.executable, "-P", "-c", MAIN, str(os.getpid()), path]
    with suppress(OSError):  # no memory or processes left: the run compiles when it needs them
        # A session of its own: Ctrl-C in the terminal ends the run, and that ends it.
        _started.append(subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True))


def main() -> None:
    """Compile, or end with the parent, whose process id is the first argument; the second one is `sys.path`."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(sys.argv[1]):
        return
    from omagd.components import selection
    from omagd.modules.kernels import compiled_kernels

    if compiled_kernels() is not None:
        selection.compiled()
