"""Keys of precision, compiling and memory that a machine cannot serve: one line before anything starts."""

from __future__ import annotations

import types

import pytest
import torch

from omagd.config.env_info import EntityLayout, EnvInfo
from omagd.config.loading import resolve
from omagd.run.topology import Plan
from omagd.run.training import device as machine
from omagd.run.training.device import check_machine, deterministic_algorithms, limit_memory, processor_features
from omagd.utils.errors import UserError

LAYOUT = EntityLayout(4, 6, 5, 4, 5, 1)
INFO = EnvInfo("null", "5m_vs_6m", 5, 12, 55, 98, 70, 6, LAYOUT)
CPU, GPU = Plan(1, "gloo", False, False), Plan(1, "nccl", True, False)


def check(plan: Plan = CPU, config: str = "qmix", **updates) -> None:
    check_machine(resolve(config=config, env_config="skirmish", updates=updates), plan, INFO)


def refusal(plan: Plan = CPU, config: str = "qmix", **updates) -> str:
    with pytest.raises(UserError) as error:
        check(plan, config, **updates)
    assert "\n" not in error.value.render()
    return error.value.message


@pytest.fixture
def card(monkeypatch):
    """One card of 8 GB that knows bf16; what a test changes in it, the checks see."""
    made = types.SimpleNamespace(total_memory=8 * 2**30, bf16=True, capability=(8, 0), count=1, fraction=None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: made.count)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda card: made)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda card=0: "Card")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda card: made.capability)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: made.bf16)
    monkeypatch.setattr(
        torch.cuda, "set_per_process_memory_fraction", lambda share, of: setattr(made, "fraction", share)
    )
    return made


def test_bf16_only_where_it_is_faster(monkeypatch, card, tmp_path):
    listed = tmp_path / "cpuinfo"
    listed.write_text("processor: 0\nflags\t\t: fpu avx512f avx512_bf16 vme\nprocessor: 1\n")
    assert processor_features(str(listed)) == {"fpu", "avx512f", "avx512_bf16", "vme"}
    assert processor_features(str(tmp_path / "nowhere")) == frozenset()
    for name, fast in {"avx512f": False, "avx512_bf16": True, "amx_bf16": True, "bf16": True}.items():
        monkeypatch.setattr(machine, "processor_features", lambda name=name: frozenset({name}))
        if fast:
            check(precision="bf16", acting_precision="bf16")
            continue
        assert all(f"{key}=bf16" in refusal(**{key: "bf16"}) for key in ("precision", "acting_precision"))
        check(GPU, precision="bf16", acting_precision="bf16")  # the GPU decides, but for acting on the CPU
        assert "acting_precision=bf16" in refusal(GPU, precision="bf16", acting_precision="bf16", cpu_inference=True)
    card.bf16 = False
    assert "precision=bf16: Card" in refusal(GPU, precision="bf16")


def test_compile_needs_a_compiler_on_cpus_and_triton_on_gpus(monkeypatch, card, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    assert "neither g++ nor clang++" in refusal(compile=True)
    compiler = tmp_path / "clang++"
    compiler.write_text("#!/bin/sh\n")
    compiler.chmod(0o755)
    monkeypatch.setattr(machine.sysconfig, "get_path", lambda name: str(tmp_path))
    assert "Python.h" in refusal(compile=True)
    (tmp_path / "Python.h").touch()
    check(compile=True)
    monkeypatch.setenv("CXX", "other++")
    assert "CXX=other++ is not found" in refusal(compile=True)
    monkeypatch.setattr(machine.importlib.util, "find_spec", lambda name: None)
    assert "Triton" in refusal(GPU, compile=True)
    monkeypatch.setattr(machine.importlib.util, "find_spec", lambda name: name)
    check(GPU, compile=True)
    card.capability = (6, 1)
    assert "Triton does not compile for Card" in refusal(GPU, compile=True)


def test_the_memory_cap_must_be_there_for_each_rank_of_a_card(card):
    assert "max_memory_per_gpu_gb=2: " in refusal(max_memory_per_gpu_gb=2.0)
    check(GPU, max_memory_per_gpu_gb=8.0)
    assert "a rank can have 8.0 GB" in refusal(GPU, max_memory_per_gpu_gb=8.5)
    two = Plan(2, "gloo", True, False)
    assert "a rank can have 4.0 GB of a GPU here, shared by 2 ranks" in refusal(two, max_memory_per_gpu_gb=6.0)
    card.count = 2
    check(two, max_memory_per_gpu_gb=6.0)
    limit_memory(torch.device("cuda", 0), 2.0)
    assert card.fraction == 0.25
    card.fraction = None
    limit_memory(torch.device("cuda", 0), None)
    limit_memory(torch.device("cpu"), 2.0)
    assert card.fraction is None


def test_deterministic_algorithms_are_asked_for_while_a_run_lasts(monkeypatch):
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    with deterministic_algorithms(False):
        assert not torch.are_deterministic_algorithms_enabled()
    with pytest.raises(ZeroDivisionError), deterministic_algorithms(True):
        assert torch.are_deterministic_algorithms_enabled()
        assert machine.os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
        assert not torch.backends.cudnn.benchmark
        raise ZeroDivisionError
    assert not torch.are_deterministic_algorithms_enabled()
    assert torch.backends.cudnn.benchmark


def test_replay_on_the_gpu_must_fit(card):
    check(buffer_cpu_only=False, buffer_size=10**6)  # without a GPU it means nothing
    check(GPU, buffer_cpu_only=False)
    check(GPU, buffer_size=10**6)
    line = refusal(GPU, buffer_cpu_only=False, buffer_size=100_000)
    assert "buffer_size=100000" in line
    assert "buffer_cpu_only=True" in line
    assert "a rank can have 0.2 GB" in refusal(GPU, buffer_cpu_only=False, max_memory_per_gpu_gb=0.2)


def test_more_parts_than_episodes_are_refused():
    with pytest.raises(UserError, match="accumulate=9: must be at most batch_size=8"):
        resolve(config="qmix", env_config="skirmish", updates={"accumulate": 9, "batch_size": 8})
