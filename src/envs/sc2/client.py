"""Connection to a game: protobuf messages over a websocket, with several requests in flight.

The handshake is websocket-client's. Frames are written and read here: the game answers in order and accepts requests
before it has answered earlier ones, so the three requests of a step are sent together.
"""

from __future__ import annotations

import ast
import contextlib
import importlib
import socket
import struct
import sys
from pathlib import Path
from types import ModuleType

import s2clientprotocol
import websocket
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


_FINAL, _MASKED, _SIZE = 0x80, 0x80, 0x7F
_CONTINUED, _BINARY, _CLOSE, _PING, _PONG = 0, 2, 8, 9, 10
_AT_ONCE = 1 << 18


class Disconnected(Exception):
    """The other side is gone, silent for too long, or sends an invalid frame."""


def frame(message: bytes, opcode: int = _BINARY) -> bytes:
    """Return a client frame around `message`. The mask is zero, which leaves the message unchanged."""
    size = len(message)
    if size < 126:
        head = struct.pack("!BB", _FINAL | opcode, _MASKED | size)
    elif size < 1 << 16:
        head = struct.pack("!BBH", _FINAL | opcode, _MASKED | 126, size)
    else:
        head = struct.pack("!BBQ", _FINAL | opcode, _MASKED | 127, size)
    return head + b"\0\0\0\0" + message


class Wire:
    """An open connection.

    Args:
        address: "ws://…". timeout: seconds for the handshake. Errors: OSError, websocket.WebSocketException.
    """

    def __init__(self, address: str, timeout: float) -> None:
        self._web = websocket.create_connection(address, timeout=timeout)
        assert self._web.sock is not None
        self._sock: socket.socket = self._web.sock
        self._buffer = bytearray()
        self._arrived = memoryview(bytearray(_AT_ONCE))

    def set_timeout(self, seconds: float) -> None:
        """Set the timeout of each send and receive in the kernel, which is cheaper than Python's timeouts."""
        self._sock.settimeout(None)
        whole = int(seconds)
        limit = struct.pack("@ll", whole, max(int((seconds - whole) * 1e6), 1))
        for which in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            self._sock.setsockopt(socket.SOL_SOCKET, which, limit)

    def send(self, frames: bytes) -> None:
        """Send whole frames. Errors: Disconnected."""
        try:
            self._sock.sendall(frames)
        except OSError as error:
            raise Disconnected(str(error)) from None

    def receive(self) -> bytes:
        """Return the next message. Errors: Disconnected."""
        parts: list[bytes] = []
        while True:
            first, body = self._frame()
            opcode = first & 0x0F
            if opcode in (_BINARY, _CONTINUED):
                if first & _FINAL:
                    return b"".join([*parts, body]) if parts else body
                parts.append(body)
            elif opcode == _PING:
                self.send(frame(body, _PONG))
            elif opcode != _PONG:
                raise Disconnected("it closed the connection" if opcode == _CLOSE else f"a frame of kind {opcode}")

    def _frame(self) -> tuple[int, bytes]:
        """Return the first byte and the content of the next frame."""
        buffer = self._buffer
        if len(buffer) < 2:
            self._fill(2)
        start, size = 2, buffer[1] & _SIZE
        if size == 126:
            self._fill(4)
            start, size = 4, int.from_bytes(buffer[2:4], "big")
        elif size == 127:
            self._fill(10)
            start, size = 10, int.from_bytes(buffer[2:10], "big")
        if len(buffer) < start + size:
            self._fill(start + size)
        first, body = buffer[0], bytes(buffer[start : start + size])
        del buffer[: start + size]
        return first, body

    def _fill(self, size: int) -> None:
        """Read on until the buffer holds that many bytes."""
        while len(self._buffer) < size:
            try:
                count = self._sock.recv_into(self._arrived)
            except BlockingIOError:
                raise Disconnected("no answer in time") from None
            except OSError as error:
                raise Disconnected(str(error)) from None
            if not count:
                raise Disconnected("the connection has ended")
            self._buffer += self._arrived[:count]

    def close(self) -> None:
        """Close the connection without a closing handshake."""
        with contextlib.suppress(OSError):
            self._sock.close()
