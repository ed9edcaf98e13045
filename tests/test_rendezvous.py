"""Where ranks meet: not reachable from outside where they are on one host, and clean after a restart."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

import pytest
import torch
from sockets import listening

from omagd.utils import dist_utils
from omagd.utils.dist_utils import (
    cleanup_distributed,
    open_rendezvous,
    setup_distributed,
    unwrap_model,
    wrap_model_ddp,
)


def test_the_store_listens_on_this_host_alone():
    with socket.socket() as stranger:
        stranger.bind(("", 0))
        stranger.listen()
        addresses = listening([os.getpid()])[os.getpid()]
        assert [str(address) for address in addresses if not address.is_loopback] == ["0.0.0.0"]
    before = listening([os.getpid()])[os.getpid()]
    store = open_rendezvous(0)
    added = listening([os.getpid()])[os.getpid()] - before
    assert all(address.is_loopback for address in added)
    socket.create_connection(("127.0.0.1", store.port), timeout=5).close()
    with pytest.raises(OSError), socket.create_connection(("127.0.0.2", store.port), timeout=5):
        pass


def test_a_port_is_held_from_the_moment_it_is_chosen():
    first = open_rendezvous(0)
    second = open_rendezvous(first.port)
    assert first.port != second.port


def test_an_interface_that_the_user_has_named_is_kept(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    monkeypatch.delenv("NCCL_SOCKET_IFNAME", raising=False)
    dist_utils._stay_on_this_host()
    assert (os.environ["GLOO_SOCKET_IFNAME"], os.environ["NCCL_SOCKET_IFNAME"]) == ("eth7", "lo")
    monkeypatch.delenv("NCCL_SOCKET_IFNAME")


# One rank of a group that some batch system has started, with the environment variables alone: no store of an agent.
MEMBER = """
import os, sys
import torch
from sockets import listening
from omagd.utils.dist_utils import Dist, cleanup_distributed, open_board, setup_distributed
rank, attempt = int(os.environ["RANK"]), int(sys.argv[1])
setup_distributed(rank, 2, "gloo", int(os.environ["MASTER_PORT"]), 0.5, attempt=attempt)
dist = Dist(rank, 2)
board = open_board(rank, int(os.environ["MASTER_PORT"]), 0.5, hosted=False, attempt=attempt)
board.set(str(rank), f"here {rank}")
assert board.get(str(1 - rank)) == f"here {1 - rank}".encode()
assert dist.sum(torch.ones(1)).item() == 2
print(sorted({str(address) for address in listening([os.getpid()])[os.getpid()]}), flush=True)
dist.sum(torch.ones(1))
cleanup_distributed()
"""


@pytest.mark.processes
def test_without_an_agent_rank_0_holds_the_store_at_the_address_that_was_given():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    path = os.pathsep.join(part for part in (os.path.dirname(__file__), os.environ.get("PYTHONPATH", "")) if part)
    shared = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "GLOO_SOCKET_IFNAME": "lo"}
    members = [
        subprocess.Popen(
            [sys.executable, "-c", MEMBER, "1"],
            env={**os.environ, **shared, "RANK": str(rank), "PYTHONPATH": path},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    for member in members:
        out, err = member.communicate(timeout=60)
        assert member.returncode == 0, err
        assert out.strip() == "['127.0.0.1']"


def test_the_documented_calls_work_without_a_gpu_by_their_defaults(monkeypatch):
    """As published: setup_distributed(rank, world_size), wrap_model_ddp(model, rank), with parameters left unused."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for name in ("RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)

    class Branches(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.unused = torch.nn.Linear(2, 1), torch.nn.Linear(2, 1)

        def forward(self, x):
            return self.used(x).sum()

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    setup_distributed(0, 1, port=port)
    try:
        assert torch.distributed.get_backend() == "gloo"
        wrapped = wrap_model_ddp(Branches(), 0)
        for _ in range(2):  # the second forward is what fails where parameters must not be unused
            wrapped(torch.ones(3, 2)).backward()
        assert unwrap_model(wrapped).used.weight.grad.tolist() == [[6.0, 6.0]]
        assert wrapped.find_unused_parameters
    finally:
        cleanup_distributed()
