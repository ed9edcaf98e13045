"""What a rank is doing: how long it has waited for others, and how far it is, for the watchdog and for reports."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from omagd.utils.errors import causes

_STARTED = time.perf_counter()


@dataclass
class Waits:
    """Waiting time of this rank in exchanges (collectives), and its progress for the watchdog.

    Attributes:
        seconds: total wait, including for late ranks. calls: number of exchanges.
        known: time at which the last gradient of this rank was computed.
        entered: exchanges that this rank has begun.
        place: returns stage, phase and start of the phase.
        on_error: called with the error that ends this rank's run, before anything is closed.
        ticks: steps of environments and backward passes so far. playing: True while episodes are played.
        inside: True within an exchange. slots: returns the seeds of the slots that the environment works on, by slot.
        asked: mask [B] and seeds [B] of the slots that a runner has requested from the environment.
    """

    seconds: float = 0.0
    calls: int = 0
    known: float | None = None
    entered: int = 0
    place: Callable[[], tuple[str, str, float]] = lambda: ("", "start", _STARTED)
    on_error: Callable[[BaseException], None] = lambda error: None
    ticks: int = 0
    playing: bool = False
    inside: bool = False
    slots: Callable[[], dict[int, int]] = dict
    asked: tuple[np.ndarray, np.ndarray] | None = None

    @contextmanager
    def doing(self, phase: str) -> Iterator[None]:
        """Set the rank's place within the block."""
        before, began = self.place, time.perf_counter()
        self.place = lambda: ("", phase, began)
        try:
            yield
        finally:
            self.place = before

    def played(self, going_on: bool) -> None:
        """Count one step of the environments; `going_on` is False after the last one."""
        self.ticks += 1
        self.playing = going_on
        if not going_on:
            self.asked = None

    def ask(self, which: np.ndarray, seeds: np.ndarray) -> None:
        """Record the slots `which` ([B] bool) and `seeds` ([B]) that the environment is asked for."""
        self.asked = which, seeds

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Count a block as one exchange."""
        self.entered += 1
        started = time.perf_counter()
        try:
            with exchange(self):
                yield
        finally:
            self.add(started)

    def add(self, started: float) -> None:
        """Count one exchange whose wait began at `started`."""
        self.seconds += time.perf_counter() - started
        self.calls += 1

    def note(self, _: Tensor) -> None:
        """Record the time of a computed gradient."""
        self.known = time.perf_counter()


@contextmanager
def exchange(waits: Waits) -> Iterator[None]:
    """Mark an error of the block as one of an exchange, which the end of another rank may have caused."""
    waits.inside = True
    try:
        yield
    except RuntimeError as error:
        if not isinstance(error, torch.OutOfMemoryError):
            error.in_exchange = True  # type: ignore[attr-defined]
        raise
    finally:
        waits.inside = False


def broken_exchange(error: BaseException) -> BaseException | None:
    """Return the error that broke an exchange: `error` or one of its causes; None if there is none."""
    return next((cause for cause in causes(error) if getattr(cause, "in_exchange", False)), None)
