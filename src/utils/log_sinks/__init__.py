"""Where logged values go: one class for each place; `REGISTRY` maps names to them."""

from __future__ import annotations

from omagd.utils.registry import Registry

REGISTRY: Registry[type] = Registry(
    "log sink",
    "omagd.log_sinks",
    lazy={
        "console": "omagd.utils.log_sinks.console:ConsoleSink",
        "jsonl": "omagd.utils.log_sinks.jsonl:JsonLinesSink",
        "sacred": "omagd.utils.log_sinks.sacred:SacredSink",
        "wandb": "omagd.utils.log_sinks.wandb:WandbSink",
        "tensorboard": "omagd.utils.log_sinks.tensorboard:TensorBoardSink",
    },
)
