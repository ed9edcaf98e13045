"""Sacred's scalars: written here when the run is here, sent to the process that has it otherwise."""

from __future__ import annotations

import logging
import math
import multiprocessing
import threading
from typing import Any, Protocol

from omagd.utils.log_sinks.base import Record, RunFacts, Sink


class HasLogScalar(Protocol):
    """The one method of a Sacred run that is used."""

    def log_scalar(self, metric_name: str, value: float, step: int | None = None) -> None:
        """Record one value."""


class SacredSink(Sink):
    """Every value as a Sacred scalar. A Sacred run cannot be pickled, so a worker sends `(key, value, t)` to it.

    Names of stages 1 and 2 get the stage in front, since Sacred has one axis for each name.

    Args:
        target: the Sacred run itself; or a queue, or the sender of a `SacredRelay`.
    """

    name = "Sacred's scalars"

    def __init__(self, target: Any) -> None:
        super().__init__()
        self._target = target
        self._before: list[str] = []

    def _open(self, facts: RunFacts) -> None:
        self._before = list(facts.saved.get(self.name, {}).get("ids", []))

    def state_dict(self) -> dict[str, Any]:
        """Return the ids of Sacred's records of this run, one for each start."""
        own = getattr(self._target, "_id", None)
        return {"ids": [*self._before, *([] if own is None else [str(own)])]}

    def _log(self, record: Record) -> None:
        for key, value in record.values.items():
            if key in record.private or not math.isfinite(value):
                continue
            name = key if record.stage == "stage3" else f"{record.stage}/{key}"
            if hasattr(self._target, "log_scalar"):
                self._target.log_scalar(name, float(value), int(record.t))
            else:
                send = self._target.put if hasattr(self._target, "put") else self._target.send
                send((name, float(value), int(record.t)))

    def _close(self, exit_state: str) -> None:
        pass


class Sender:
    """A worker's end of a `SacredRelay`.

    Args:
        connection: to the parent. run_id: of Sacred's run there.
    """

    def __init__(self, connection: Any, run_id: Any) -> None:
        self._connection, self._id = connection, run_id

    def send(self, message: tuple[str, float, int]) -> None:
        """Send one value."""
        self._connection.send(message)

    def fileno(self) -> int:
        """Return the number of the pipe's handle."""
        return int(self._connection.fileno())

    def close(self) -> None:
        """Hang up."""
        self._connection.close()


class SacredRelay:
    """The parent's end: a thread that hands what workers send to the Sacred run.

    A pipe, not a queue: a worker has no thread that could keep it from ending, and gets an error, not a full pipe,
    when its parent is gone.

    Args:
        run: the Sacred run.

    Attributes:
        sender: goes to the workers as an argument of theirs.
    """

    def __init__(self, run: HasLogScalar) -> None:
        self._run = run
        self._receiver, sender = multiprocessing.get_context("spawn").Pipe(duplex=False)
        self.sender = Sender(sender, getattr(run, "_id", None))
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._drain, name="sacred-relay", daemon=True)
        self._thread.start()

    def stop(self, timeout: float = 5.0) -> bool:
        """Take what is still there and stop; return whether that was done within `timeout` seconds.

        A worker that died in the middle of a message cannot hold the parent: the thread is left behind then.
        """
        self._stop.set()
        self._thread.join(timeout)
        done = not self._thread.is_alive()
        if done:
            self._receiver.close()
            self.sender.close()
        return done

    def _drain(self) -> None:
        warned = False
        while True:
            stopping = self._stop.is_set()
            try:
                if not self._receiver.poll(0.0 if stopping else 0.2):
                    if stopping:
                        return
                    continue
                key, value, t = self._receiver.recv()
            except (EOFError, OSError):
                return
            try:
                self._run.log_scalar(key, value, t)
            except Exception as error:  # noqa: BLE001 (workers must never wait for a Sacred run that has broken)
                if not warned:
                    logging.getLogger("omagd").warning("Sacred takes no more scalars: %s", error)
                warned = True
