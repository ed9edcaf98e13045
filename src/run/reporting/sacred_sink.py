"""Sends values to Sacred: directly in the process of the Sacred run, through a pipe from its workers."""

from __future__ import annotations

import logging
import math
import multiprocessing
import threading
from typing import Any

from omagd.utils.logging import Record, Sink


class SacredSink(Sink):
    """Records every value as a Sacred scalar, `(key, value, t)`.

    Sacred has one time axis per name, so names of stages 1 and 2 are prefixed with the stage.

    Args:
        target: the Sacred run; in a worker, where it cannot be pickled, the `sender` of a `SacredRelay`.
    """

    name = "Sacred's scalars"

    def __init__(self, target: Any) -> None:
        self._target = target

    def state_dict(self) -> dict[str, Any]:
        """Return the ids of this run's Sacred records, one for each start."""
        own = getattr(self._target, "_id", None)
        return {"ids": [*self.saved.get("ids", []), *([] if own is None else [str(own)])]}

    def _log(self, record: Record) -> None:
        for key, value in record.values.items():
            if math.isfinite(value):
                name = key if record.stage == "stage3" else f"{record.stage}/{key}"
                self._target.log_scalar(name, value, record.t)


class Sender:
    """A worker's end of a `SacredRelay`, used like the Sacred run.

    Args:
        connection: to the parent. run_id: of the parent's Sacred run.
    """

    def __init__(self, connection: Any, run_id: Any) -> None:
        self.connection, self._id = connection, run_id

    def log_scalar(self, name: str, value: float, t: int) -> None:
        """Send one value."""
        self.connection.send((name, value, t))


class SacredRelay:
    """The parent's end: a thread that passes the workers' values to the Sacred run.

    It is a pipe, not a queue: a queue's feeder thread can keep a worker from exiting, and blocks on a full pipe when
    the parent has died.

    Args:
        run: the Sacred run.

    Attributes:
        sender: to be passed to the workers as an argument.
    """

    def __init__(self, run: Any) -> None:
        self._run = run
        self._receiver, sender = multiprocessing.get_context("spawn").Pipe(duplex=False)
        self.sender = Sender(sender, getattr(run, "_id", None))
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._drain, name="sacred-relay", daemon=True)
        self._thread.start()

    def stop(self, timeout: float = 5.0) -> bool:
        """Receive the remaining values and stop; return whether that took less than `timeout` seconds.

        A worker that died in the middle of a message cannot block the parent: the thread is abandoned then.
        """
        self._stop.set()
        self._thread.join(timeout)
        done = not self._thread.is_alive()
        if done:
            self._receiver.close()
            self.sender.connection.close()
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
            except Exception as error:  # noqa: BLE001 (workers must not wait for a failed Sacred run)
                if not warned:
                    logging.getLogger("omagd").warning("Sacred rejects scalars: %s", error)
                warned = True
