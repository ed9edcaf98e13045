"""Runners play episodes; `REGISTRY` maps `runner=` names to them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from omagd.utils.registry import Registry

if TYPE_CHECKING:
    from omagd.runners.runner import Runner

REGISTRY: Registry[type[Runner]] = Registry(
    "runner",
    "omagd.runners",
    lazy={
        "episode": "omagd.runners.runner:EpisodeRunner",
        "parallel": "omagd.runners.runner:ParallelRunner",
        "resident": "omagd.resident.runner:ResidentRunner",
        "stream": "omagd.runners.stream_runner:StreamRunner",
        "ticks": "omagd.runners.stream_runner:TickRunner",
    },
    protocol="omagd.runners.runner:Runner",
)
