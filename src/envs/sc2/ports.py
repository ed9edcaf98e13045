"""TCP ports for games: claimed for good, so that games started at the same moment never get the same one."""

from __future__ import annotations

import contextlib
import random
import socket
import sys
from collections.abc import Iterator

HOST = "127.0.0.1"
# Above those that pysc2's own port picker draws from, below those that Linux gives to outgoing connections.
LOWEST, HIGHEST = 25000, 32000
TRIES = 1000


@contextlib.contextmanager
def claimed_port() -> Iterator[int]:
    """Yield a free port that no other caller on this machine gets meanwhile. Errors: OSError when there is none.

    The claim is the name of an abstract Unix socket: valid for all users who share the ports, and gone with the
    process however that ends.
    """
    chance = random.SystemRandom()  # not the run's: workers of one seed must not try the same ports
    for _ in range(TRIES):
        port = chance.randrange(LOWEST, HIGHEST)
        claim = _claim(port)
        if claim is None:
            continue
        with claim:
            if _is_free(port):
                yield port
                return
    raise OSError(f"no free port between {LOWEST} and {HIGHEST}")


def _claim(port: int) -> socket.socket | None:
    claim = socket.socket(socket.AF_UNIX if sys.platform == "linux" else socket.AF_INET)
    try:
        if sys.platform == "linux":
            claim.bind(f"\0omagd-sc2-port-{port}")
    except OSError:
        claim.close()
        return None
    return claim


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError:
            return False
    return True
