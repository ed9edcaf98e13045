"""Keys of precision, compiling and memory that a machine cannot serve are rejected; device settings have an effect."""

from __future__ import annotations

import os
import resource
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from omagd.config.env_info import EntityLayout, EnvInfo
from omagd.config.loading import resolve
from omagd.run.launchers import Plan
from omagd.run.training import device
from omagd.run.training.device import check_machine, deterministic_algorithms, keep_freed_memory, processor_features
from omagd.utils.dist_utils import Dist
from omagd.utils.errors import UserError

INFO = EnvInfo("null", "5m_vs_6m", 5, 12, 55, 98, 70, 6, EntityLayout(4, 6, 5, 4, 5, 1))
CPU, GPU, SHARED_GPU = (Plan(*values, False) for values in ((1, "gloo", False), (1, "nccl", True), (2, "gloo", True)))


def check(plan: Plan = CPU, error: str = "", **updates) -> None:
    """Check these keys on a machine; with `error`, they must be rejected in one line that contains it."""
    with pytest.raises(UserError) if error else nullcontext() as raised:
        check_machine(resolve(config="qmix", env_config="skirmish", updates=updates), plan, INFO)
    assert not error or (error in raised.value.message and "\n" not in raised.value.render())


@pytest.fixture
def card(monkeypatch):
    """Simulate one card of 8 GB with bf16; the checks see what a test changes in it."""
    made = SimpleNamespace(total_memory=8 * 2**30, bf16=True, capability=(8, 0), count=1, fraction=None)
    functions = {
        "device_count": lambda: made.count,
        "get_device_properties": lambda card: made,
        "get_device_name": lambda card=0: "Card",
        "get_device_capability": lambda card: made.capability,
        "is_bf16_supported": lambda including_emulation: made.bf16,
        "set_per_process_memory_fraction": lambda share, of: setattr(made, "fraction", share),
    }
    for name, function in functions.items():
        monkeypatch.setattr(torch.cuda, name, function)
    return made


def test_bf16_is_accepted_where_it_is_faster(monkeypatch, card, tmp_path):
    listed = tmp_path / "cpuinfo"
    listed.write_text("processor: 0\nflags\t\t: fpu avx512f avx512_bf16 vme\nprocessor: 1\n")
    assert processor_features(str(listed)) == {"fpu", "avx512f", "avx512_bf16", "vme"}
    assert processor_features(str(tmp_path / "missing")) == frozenset()
    both = {"precision": "bf16", "acting_precision": "bf16"}
    for name in ("avx512_bf16", "amx_bf16", "bf16", "avx512f"):
        monkeypatch.setattr(device, "processor_features", lambda name=name: frozenset({name}))
        if name != "avx512f":
            check(**both)
    for key in both:
        check(error=f"{key}=bf16", **{key: "bf16"})
    check(GPU, **both)
    check(GPU, "acting_precision=bf16", **both, cpu_inference=True)
    card.bf16 = False
    check(GPU, "precision=bf16: Card", precision="bf16")


def test_the_replay_of_each_rank_must_fit_on_its_card(card):
    check(error="accumulate=9: must be at most batch_size=8", accumulate=9, batch_size=8)
    check(buffer_cpu_only=False, buffer_size=10**6)  # no effect without a GPU
    check(GPU, buffer_cpu_only=False)
    check(GPU, buffer_size=10**6)
    check(GPU, "buffer_size=100000", buffer_cpu_only=False, buffer_size=100_000)
    check(GPU, "buffer_cpu_only=True", buffer_cpu_only=False, buffer_size=100_000)


@pytest.mark.parametrize(("given", "free", "ranks", "where"), [
    (None, 8, 1, "cuda:0"), (None, 1, 1, "cpu"), (None, 8, 9, "cpu"), (True, 8, 1, "cpu"), (False, 1, 1, "cuda:0"),
])  # fmt: skip
def test_replay_is_on_the_gpu_where_it_fits_into_a_quarter_of_what_is_free(
    monkeypatch, card, given, free, ranks, where
):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free * 2**30, 0))
    config = resolve("qmix", "skirmish", {"buffer_cpu_only": given})
    place, why = device.replay_device(config, INFO, Dist(0, ranks, torch.device("cuda", 0)))
    assert str(place) == where
    assert ("in main memory" in why) == (where == "cpu") and ("buffer_cpu_only=" in why) == (given is not None)
    assert device.replay_device(config, INFO, Dist()) == (torch.device("cpu"), "")


def test_deterministic_algorithms_are_used_within_the_block(monkeypatch):
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    for wanted in (False, True):
        with pytest.raises(ZeroDivisionError), deterministic_algorithms(wanted):
            assert torch.are_deterministic_algorithms_enabled() == wanted
            assert os.environ.get("CUBLAS_WORKSPACE_CONFIG") == (":4096:8" if wanted else None)
            assert torch.backends.cudnn.benchmark != wanted
            raise ZeroDivisionError
    assert not torch.are_deterministic_algorithms_enabled() and torch.backends.cudnn.benchmark


def page_faults() -> int:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.empty(40 << 20, dtype=torch.uint8).fill_(1)  # by default glibc maps blocks above 32 MiB each time
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


def test_freed_memory_is_kept_for_the_next_request():
    if not keep_freed_memory():
        pytest.skip("not glibc")
    assert min(page_faults() for _ in range(20)) < 10  # a mapped block has at least 20, also with huge pages


def test_too_few_open_files_are_made_enough_or_named_before_the_run(monkeypatch):
    """Two workers fit below a hard limit of 100, 24 do not."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(24, soft // 2), hard))
        device.raise_limit(soft)
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] >= soft
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    monkeypatch.setattr(device.resource, "getrlimit", lambda kind: (24, 100))
    monkeypatch.setattr(device, "processes_left", lambda: (10**6, ""))
    words = {"env_processes": True, "use_cuda": False}
    check(batch_size_run=2, **words)
    check(error="batch_size_run=24: 24 environments in processes", batch_size_run=24, **words)
    check(error="(ulimit -Hn)", batch_size_run=24, **words)


def test_processes_are_counted_per_user_and_per_control_group(tmp_path, monkeypatch):
    monkeypatch.setattr(device.os, "geteuid", lambda: 1000)
    monkeypatch.setattr(device.resource, "getrlimit", lambda kind: (500, 500))
    proc, groups = tmp_path / "proc", tmp_path / "cgroup"
    for number in range(3):
        (proc / str(number) / "task" / "1").mkdir(parents=True)
    (proc / "self").mkdir()
    assert device.processes_left(proc, groups) == (497, "ulimit -u: 500")
    (proc / "self" / "cgroup").write_text("0::/slice/job/step\n")
    (groups / "slice" / "job" / "step").mkdir(parents=True)
    for folder, most in (("slice", "max"), ("slice/job", "100"), ("slice/job/step", "400")):
        (groups / folder / "pids.max").write_text(most)
        (groups / folder / "pids.current").write_text("90")
    left, why = device.processes_left(proc, groups)
    assert left == 10 and "100" in why
    plan, config = Plan(2, "gloo", False, False), resolve("qmix", "matrix_game", {})
    monkeypatch.setattr(device, "processes_left", lambda: (left, why))
    with pytest.raises(UserError, match="world_size=2: 2 ranks need .* 10 are left .pids.max"):
        device._check_limits(config, plan)
