"""The server's side of a websocket connection. Frames are read and written by websocket-client."""

from __future__ import annotations

import base64
import hashlib
import http.client
import socket

from websocket import ABNF, WebSocket, WebSocketException

GUID = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"  # RFC 6455, section 1.3
ACCEPTED = b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Accept: "


class Gone(Exception):
    """The client has closed the connection, or never opened one to this path."""


class Connection(WebSocket):
    """A connection on an accepted socket. Errors: Gone."""

    def __init__(self, sock: socket.socket, path: bytes = b"/sc2api") -> None:
        super().__init__(skip_utf8_validation=True)
        sock.settimeout(None)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.sock = sock
        with sock.makefile("rb") as stream:
            request, fields = stream.readline().split(), http.client.parse_headers(stream)
        if request[1:2] != [path] or "Sec-WebSocket-Key" not in fields:
            sock.sendall(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n")
            raise Gone
        key = hashlib.sha1(fields["Sec-WebSocket-Key"].encode() + GUID).digest()
        sock.sendall(ACCEPTED + base64.b64encode(key) + b"\r\n\r\n")

    def receive(self) -> bytes:
        """Return the next message."""
        try:
            opcode, message = self.recv_data()
        except (OSError, WebSocketException) as error:
            raise Gone from error
        if opcode == ABNF.OPCODE_CLOSE:
            raise Gone
        return message

    def answer(self, message: bytes) -> None:
        """Send one binary message, unmasked as a server's messages are."""
        try:
            self.send_frame(ABNF(1, 0, 0, 0, ABNF.OPCODE_BINARY, 0, message))
        except (OSError, WebSocketException) as error:
            raise Gone from error
