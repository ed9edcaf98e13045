"""The connection to a game: protobuf messages over a websocket, several requests at a time.

The handshake is websocket-client's. After it, frames are written and read here: the game answers in order and takes
requests before it has answered earlier ones, so that the three requests of a step can travel together.
"""

from __future__ import annotations

import contextlib
import socket
import struct

import websocket

_FINAL, _MASKED, _SIZE = 0x80, 0x80, 0x7F
_CONTINUED, _BINARY, _CLOSE, _PING, _PONG = 0, 2, 8, 9, 10
_AT_ONCE = 1 << 18


class Disconnected(Exception):
    """The other side is gone, silent for too long, or says what is no websocket frame."""


def frame(message: bytes, opcode: int = _BINARY) -> bytes:
    """Return the client's frame around `message`. Its mask is zero, which leaves the message as it is."""
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
        """Let the kernel watch how long the other side is silent: cheaper than Python's own timeouts."""
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
        """Close the connection without a farewell."""
        with contextlib.suppress(OSError):
            self._sock.close()
