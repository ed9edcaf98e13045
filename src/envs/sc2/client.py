"""The game's protobuf messages, with every version of protobuf. pysc2 takes the modules that are made here."""

from __future__ import annotations

import ast
import importlib
import sys
from pathlib import Path
from types import ModuleType

import s2clientprotocol
from absl import flags
from google.protobuf import descriptor_pb2, descriptor_pool
from google.protobuf.internal import builder

PACKAGE = "s2clientprotocol"
_FOLDER = Path(s2clientprotocol.__path__[0])


def _descriptor(path: Path) -> bytes | None:
    """Return the serialized descriptor in a module generated for protobuf 3, None for a newer module."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.keyword) and node.arg == "serialized_pb" and isinstance(node.value, ast.Call):
            text = ast.literal_eval(node.value.args[0])
            return text.encode("latin1") if isinstance(text, str) else bytes(text)
    return None


def load(name: str) -> ModuleType:
    """Return the module `s2clientprotocol.<name>_pb2`.

    Modules generated for protobuf 3 cannot be imported with newer versions: build them from their descriptors.
    """
    full_name = f"{PACKAGE}.{name}_pb2"
    if full_name in sys.modules:
        return sys.modules[full_name]
    serialized = _descriptor(_FOLDER / f"{name}_pb2.py")
    if serialized is None:
        return importlib.import_module(full_name)
    for needed in descriptor_pb2.FileDescriptorProto.FromString(serialized).dependency:
        load(Path(needed).stem)
    module = ModuleType(full_name, f"The messages of {PACKAGE}/{name}.proto.")
    module.__package__ = PACKAGE
    module.DESCRIPTOR = descriptor_pool.Default().AddSerializedFile(serialized)  # type: ignore[attr-defined]
    builder.BuildMessageAndEnumDescriptors(module.DESCRIPTOR, module.__dict__)
    builder.BuildTopDescriptorsAndMessages(module.DESCRIPTOR, full_name, module.__dict__)
    sys.modules[full_name] = module
    setattr(s2clientprotocol, f"{name}_pb2", module)
    return module


for _path in sorted(_FOLDER.glob("*_pb2.py")):
    load(_path.stem.removesuffix("_pb2"))

common_pb = load("common")
debug_pb = load("debug")
raw_pb = load("raw")
sc_pb = load("sc2api")

if not flags.FLAGS.is_parsed():
    flags.FLAGS.mark_as_parsed()  # pysc2 reads its absl flags; they keep their defaults
