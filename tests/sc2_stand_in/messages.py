"""The game's protobuf messages, rebuilt from the descriptors inside s2clientprotocol's modules (not imported)."""

from __future__ import annotations

import ast
import importlib
import re
from pathlib import Path
from types import SimpleNamespace

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

PARTS = ("common", "data", "error", "raw", "debug", "query", "score", "spatial", "ui", "sc2api")


def load() -> SimpleNamespace:
    """Return all top-level messages of the protocol as attributes."""
    import s2clientprotocol

    folder = Path(s2clientprotocol.__file__).parent
    pool = descriptor_pool.DescriptorPool()
    waiting = [_descriptor(folder / f"{part}_pb2.py") for part in PARTS]
    while waiting:  # in an order in which every file comes after those that it imports
        file = next(f for f in waiting if not {w.name for w in waiting} & set(f.dependency))
        waiting.remove(file)
        pool.Add(file)
    found = message_factory.GetMessageClassesForFiles([f"s2clientprotocol/{part}.proto" for part in PARTS], pool)
    return SimpleNamespace(**{name.rpartition(".")[2]: cls for name, cls in found.items() if name.count(".") == 1})


def _descriptor(path: Path) -> descriptor_pb2.FileDescriptorProto:
    """Return the descriptor of a generated module: its one string literal, or as it says when it is a newer one."""
    literal = re.search(r"serialized_pb=_b\((.*)\)\n", path.read_text(encoding="latin1"))
    if literal is None:
        serialized = importlib.import_module(f"s2clientprotocol.{path.stem}").DESCRIPTOR.serialized_pb
    else:
        serialized = ast.literal_eval(literal[1]).encode("latin1")
    return descriptor_pb2.FileDescriptorProto.FromString(serialized)
