"""What compiles, keeps and launches kernels on NVIDIA GPUs, with Numba and torch's streams replaced."""

from __future__ import annotations

import contextlib
import logging
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from omagd import runners
from omagd.config.loading import resolve
from omagd.modules.kernels import gru, gru_cuda
from omagd.resident import runner
from omagd.utils import cuda
from omagd.utils.cuda import CUDACompiler
from omagd.utils.errors import UserError

GPU = torch.device("cuda", 0)


def test_kernels_are_launched_exact_for_all_threads_and_on_torchs_stream(monkeypatch):
    from numba.cuda.cudadrv import nvvm

    class Kernel:
        def __getitem__(self, how):
            return lambda *args: made.append((how, nvvm.compile_ir.keywords, args))

    made, compiler = [], CUDACompiler(Path(__file__), "", "", exact=True)
    compiler.jitted = lambda function: Kernel()
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=7))
    monkeypatch.setattr(cuda.cuda, "external_stream", lambda pointer: pointer)
    compiler.kernels({"count": print}, GPU, threads=32).run("count", 33, "a", "b")
    assert made == [((2, 32, 7), {"fma": 0}, ("a", "b"))]


def test_another_source_or_numba_cuda_has_another_folder_of_kernels(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    source, release, found = tmp_path / "kernel.py", ["1"], set()
    monkeypatch.setattr(cuda, "version", lambda name: release[0])
    for text, release[0] in (("a", "1"), ("b", "1"), ("b", "2")):
        source.write_text(text)
        found.add(CUDACompiler(source, "sums", "").folder)
    assert len(found) == 3
    assert Path(gru.__file__).is_relative_to(gru_cuda.compiler._source), "it has the size of the kernels' memory"


def test_grus_of_other_types_or_more_units_learn_step_by_step_and_a_line_says_what_is_missing(monkeypatch, caplog):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    x, tried = torch.zeros(1), gru._tried.__wrapped__
    monkeypatch.setattr(gru, "_tried", lambda device: "kernels")
    assert [gru.cuda_kernels(*given) for given in ((x, 128), (x, 129), (x.double(), 8))] == ["kernels", None, None]
    monkeypatch.setattr(gru, "find_spec", lambda name: None)
    with caplog.at_level(logging.INFO, gru.PACKAGE):
        assert tried(GPU) is None
    assert "numba-cuda is not installed" in caplog.text


@pytest.mark.parametrize("there", [None, "numba_cuda"])
def test_rounds_on_a_gpu_ask_for_numba_cuda_where_it_is_missing(monkeypatch, there):
    config = resolve(config="qmix", env_config="skirmish", updates={"runner": "resident", "use_cuda": True})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(runner, "find_spec", lambda name: there)
    with contextlib.nullcontext() if there else pytest.raises(UserError, match="needs numba-cuda"):
        runners.REGISTRY.get("resident").check(config)
