"""Playing episodes; `REGISTRY` maps `runner=` names to runners."""

from __future__ import annotations

from typing import TYPE_CHECKING

from omagd.utils.registry import Registry

if TYPE_CHECKING:
    from omagd.runners.rollout import Runner

REGISTRY: Registry[type[Runner]] = Registry(
    "runner",
    "omagd.runners",
    lazy={
        "episode": "omagd.runners.episode_runner:EpisodeRunner",
        "parallel": "omagd.runners.episode_runner:ParallelRunner",
        "stream": "omagd.runners.stream_runner:StreamRunner",
        "ticks": "omagd.runners.tick_runner:TickRunner",
    },
)
