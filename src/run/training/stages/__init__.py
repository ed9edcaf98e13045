"""Stages: what is trained and frozen, what is collected, which clock counts, what "best" means, what files result."""

from __future__ import annotations

from omagd.utils.registry import Registry

REGISTRY: Registry[type] = Registry(
    "stage",
    "omagd.stages",
    lazy={
        "stage1": "omagd.run.training.stages.pretraining:Stage1",
        "stage2": "omagd.run.training.stages.pretraining:Stage2",
        "stage3": "omagd.run.training.stages.rl:RLStage",
    },
)
