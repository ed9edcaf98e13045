"""The server's side of a websocket (RFC 6455), for one client at a time."""

from __future__ import annotations

import base64
import hashlib
import socket

GUID = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
TEXT, BINARY, CLOSE, PING, PONG = 1, 2, 8, 9, 10


class Gone(Exception):
    """The client has closed the connection, or was none."""


class Connection:
    """A websocket connection on an accepted socket. Raises Gone if the client goes, or asks for another path."""

    def __init__(self, sock: socket.socket, path: bytes = b"/sc2api") -> None:
        sock.settimeout(None)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._sock, self._buffer = sock, bytearray()
        self._shake_hands(path)

    def _shake_hands(self, path: bytes) -> None:
        while b"\r\n\r\n" not in self._buffer:
            self._more()
        head, _, rest = bytes(self._buffer).partition(b"\r\n\r\n")
        self._buffer = bytearray(rest)
        first, *lines = head.split(b"\r\n")
        fields = {k.strip().lower(): v.strip() for k, _, v in (line.partition(b":") for line in lines)}
        if first.split(b" ")[1:2] != [path] or b"sec-websocket-key" not in fields:
            self._sock.sendall(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n")
            raise Gone
        accept = base64.b64encode(hashlib.sha1(fields[b"sec-websocket-key"] + GUID).digest())
        self._sock.sendall(
            b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
            b"Sec-WebSocket-Accept: " + accept + b"\r\n\r\n"
        )

    def receive(self) -> bytes:
        """Return the next message."""
        message = b""
        while True:
            final, opcode, payload = self._frame()
            if opcode == CLOSE:
                raise Gone
            if opcode == PING:
                self._send_frame(PONG, payload)
            elif opcode != PONG:
                message += payload
                if final:
                    return message

    def send(self, message: bytes) -> None:
        """Send one binary message."""
        self._send_frame(BINARY, message)

    def _frame(self) -> tuple[bool, int, bytes]:
        first, second = self._take(2)
        size = second & 0x7F
        if size >= 126:
            size = int.from_bytes(self._take(2 if size == 126 else 8), "big")
        mask = self._take(4) if second & 0x80 else b"\0\0\0\0"
        payload = self._take(size)
        key = int.from_bytes((mask * (size // 4 + 1))[:size], "big")
        return bool(first & 0x80), first & 0x0F, (int.from_bytes(payload, "big") ^ key).to_bytes(size, "big")

    def _send_frame(self, opcode: int, payload: bytes) -> None:
        size = len(payload)
        if size < 126:
            head = bytes((0x80 | opcode, size))
        elif size < 1 << 16:
            head = bytes((0x80 | opcode, 126)) + size.to_bytes(2, "big")
        else:
            head = bytes((0x80 | opcode, 127)) + size.to_bytes(8, "big")
        try:
            self._sock.sendall(head + payload)
        except OSError as error:
            raise Gone from error

    def _take(self, count: int) -> bytes:
        while len(self._buffer) < count:
            self._more()
        taken = bytes(self._buffer[:count])
        del self._buffer[:count]
        return taken

    def _more(self) -> None:
        try:
            data = self._sock.recv(1 << 16)
        except OSError as error:
            raise Gone from error
        if not data:
            raise Gone
        self._buffer += data

    def close(self) -> None:
        """Close the socket."""
        self._sock.close()
