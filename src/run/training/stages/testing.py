"""The tests of stage 3: greedy battles, the best results so far, and a video of the best."""

from __future__ import annotations

import math

from omagd.controllers.types import MAC
from omagd.run.recording.recorder import Recorder
from omagd.run.recording.recording import Recording, save_recording
from omagd.run.training.battles import greedy_episodes
from omagd.run.training.session import Session
from omagd.utils.writing import STORAGE

BEST_OF = ("test_battle_won_mean", "test_return_mean")
"""Metrics whose best values are kept. The first one that an environment has is the score of the run."""


class Tests:
    """Plays tests and keeps what they gave.

    Args:
        session: of the run. mac: the team that is tested.

    Attributes:
        last: step and metrics of the last test. best: the best values so far. played, improved: whether there was a
            test in this iteration, and whether its score was the best so far.
    """

    def __init__(self, session: Session, mac: MAC) -> None:
        self.session, self.mac = session, mac
        self.last: tuple[int, dict[str, float]] = (-1, {})
        self.best: dict[str, float] = {}
        self.played = self.improved = False
        self._video: Recording | None = None  # of a test, to be shown with its log

    def begin(self) -> None:
        """Begin an iteration."""
        self.played = self.improved = False

    def play(self, t_env: int, when: str, ends: bool) -> None:
        """Play this rank's share of the test episodes greedily.

        when: stage and time, for titles. ends: whether training is over, so that the test is recorded in any case.
        """
        session, recorder = self.session, None
        if session.config.log_video and session.dist.is_main:
            recorder = Recorder(self.mac, session.env, session.info, f"{session.config.name}, {when}", most=1)
        values = greedy_episodes(session, self.mac, session.config.test_nepisode, recorder=recorder)
        before = next((self.best.get(f"best_{name}", -math.inf) for name in BEST_OF if name in values), math.inf)
        self.last, self.played = (t_env, values), True
        self.improved = (self.score() or -math.inf) > before
        for name in BEST_OF:
            if name in values:
                self.best[f"best_{name}"] = max(values[name], self.best.get(f"best_{name}", -math.inf))
        wanted = recorder is not None and recorder.episodes and (self.improved or ends)
        self._video = Recording(episodes=recorder.episodes) if recorder is not None and wanted else None

    def results(self) -> dict[str, float]:
        """Return the metrics of the last test and the best of all tests."""
        return {**self.last[1], **self.best}

    def score(self) -> float | None:
        """Return the last test's win rate, or its return."""
        return next((self.last[1][name] for name in BEST_OF if name in self.last[1]), None)

    def show(self, t_env: int) -> None:
        """Write the recorded battles of a test, if any, and send their video to the log sinks."""
        if self._video is None:
            return
        video, self._video, path = self._video, None, self.session.folder.replays / f"test_{t_env}"
        with STORAGE.attempt("replays"):
            self.session.logger.picture("test_battle", save_recording(video, path, "gif"))
