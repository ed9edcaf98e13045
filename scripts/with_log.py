#!/usr/bin/env python3
"""Run a command, pass its output through and append it to a log: with_log.py LOG COMMAND ...

If this process writes to a terminal, the command gets a terminal too, so progress bars and colours work; the log gets
the final text of each line, without colours. SIGINT, SIGTERM and SIGHUP are forwarded once; the exit code is then 130,
143 or 129, whatever the command returns. `{scratch}` in the command is a folder that is removed at the end.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import pty
import re
import selectors
import signal
import stat
import subprocess
import sys
import termios
from pathlib import Path
from types import FrameType

from omagd.run.launch.processes import temporary_folder
from omagd.utils.storage import APPEND, STORAGE, AppendFile

SIGNALS = [signal.SIGINT, signal.SIGTERM]
# nohup has it ignored, and so do those that this process starts.
SIGNALS += [signal.SIGHUP] * (signal.getsignal(signal.SIGHUP) != signal.SIG_IGN)
COLOURS = re.compile(rb"\x1b\[[0-9;?]*[A-Za-z]")
SCRATCH = "{scratch}"
END_WITH_PARENT = 1  # PR_SET_PDEATHSIG


class Stream:
    """One of the command's two outputs: where it comes from, where it goes, and the line that is not yet whole."""

    def __init__(self, target: int) -> None:
        self.target = target
        self.terminal = os.isatty(target)
        self.source, self.inner = pty.openpty() if self.terminal else os.pipe()
        self.rest = b""
        if self.terminal:
            settings = termios.tcgetattr(self.inner)
            settings[1] &= ~termios.OPOST  # the real terminal makes its own line ends
            termios.tcsetattr(self.inner, termios.TCSANOW, settings)
        self.resize()

    def resize(self) -> None:
        """Set the size of the command's terminal."""
        if self.terminal:
            fcntl.ioctl(self.source, termios.TIOCSWINSZ, fcntl.ioctl(self.target, termios.TIOCGWINSZ, bytes(8)))

    def pass_on(self) -> list[bytes] | None:
        """Show what has come; return whole lines for the log, None at the end."""
        try:
            piece = os.read(self.source, 65536)
        except OSError:  # in Linux: the last holder of a terminal has closed it
            piece = b""
        if not piece:
            return None
        show(self.target, piece)
        *lines, self.rest = (self.rest + piece).split(b"\n")
        self.rest = self.rest[self.rest.rfind(b"\r", 0, -1) + 1 :]
        return [plain(line) for line in lines]


def show(target: int, piece: bytes) -> None:
    """Write to a descriptor whose reader may have gone: the log is written all the same."""
    try:
        while piece:
            piece = piece[os.write(target, piece) :]
    except OSError:
        pass


def plain(line: bytes) -> bytes:
    """Return what of a line is seen in the end."""
    return COLOURS.sub(b"", line.rstrip(b"\r").rpartition(b"\r")[2])


def end_with_parent() -> None:
    """Let the system signal the command when this process is killed."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(END_WITH_PARENT, signal.SIGTERM)


def main(log: str, *command: str) -> int:
    """Run `command`; return its exit code, or 128 + the signal that ended it or that asked for the end."""
    if not any(SCRATCH in word for word in command):
        return run(log, *command)
    with temporary_folder("omagd_launch_") as scratch:
        return run(log, *(word.replace(SCRATCH, str(scratch)) for word in command))


def run(log: str, *command: str) -> int:
    """Do what `main` does, but for the scratch folder."""
    path = Path(log)
    os.close(open_log(path))  # what must not be written is rejected before anything runs
    streams = [Stream(1), Stream(2)]
    asked: list[int] = []
    child: list[subprocess.Popen] = []

    def hand_on(number: int, frame: FrameType | None) -> None:
        asked.append(number)
        if child and child[0].poll() is None:
            child[0].send_signal(number)

    for number in SIGNALS:
        signal.signal(number, hand_on)
    signal.signal(signal.SIGWINCH, lambda *_: [stream.resize() for stream in streams])
    # A session of its own: Ctrl-C of a terminal comes through here, once.
    child.append(
        subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=streams[0].inner, stderr=streams[1].inner,
            start_new_session=True, preexec_fn=end_with_parent,
        )
    )  # fmt: skip
    if asked:
        child[0].send_signal(asked[0])
    for stream in streams:
        os.close(stream.inner)
    file = AppendFile(path, open_log)
    copy(streams, file, child[0])
    STORAGE.close()
    code = child[0].wait()
    if asked and code != 0:
        return 128 + asked[0]
    return code if code >= 0 else 128 - code


def open_log(path: Path) -> int:
    """Open the log for appending; return its descriptor.

    Neither it nor its folder may be a link, which others could have planted. Errors: OSError.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        handle = os.open(path.name, APPEND, 0o644, dir_fd=folder)
    finally:
        os.close(folder)
    about = os.fstat(handle)
    if not stat.S_ISREG(about.st_mode) or about.st_nlink > 1:
        os.close(handle)
        raise OSError(errno.ELOOP, "it is no file of its own")
    return handle


def copy(streams: list[Stream], file: AppendFile, child: subprocess.Popen) -> None:
    """Pass on both outputs until they have ended, or the command has and nothing more is there."""
    with selectors.DefaultSelector() as selector:
        for stream in streams:
            selector.register(stream.source, selectors.EVENT_READ, stream)
        while selector.get_map():
            ready = selector.select(0.5)
            if not ready and child.poll() is not None:
                break
            for key, _ in ready:
                lines = key.data.pass_on()
                if lines is None:
                    selector.unregister(key.fd)
                    lines = [plain(key.data.rest)] if key.data.rest else []
                for line in lines:
                    file.write(line + b"\n")


if __name__ == "__main__":
    if len(sys.argv) < 3 or sys.argv[1].startswith("-"):
        asked = sys.argv[1:2] in (["-h"], ["--help"])
        (sys.stdout if asked else sys.stderr).write(__doc__)
        sys.exit(0 if asked else 2)
    try:
        sys.exit(main(*sys.argv[1:]))
    except OSError as problem:
        reason = f"{ascii(problem.filename)[1:-1]}: {problem.strerror}" if problem.filename else problem.strerror
        sys.stderr.write(f"error: the log {ascii(sys.argv[1])[1:-1]} cannot be written ({reason})\n")
        sys.exit(2)
