"""Battles in a device's memory: the reference's bits on a CPU, and kernels that compile for GPUs."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import numba
import numpy as np
import pytest
import torch
from battle_toys import JudgedByNumPy
from resident_toys import FLAGS, compile_without_a_gpu, linked_ptx, thread_after_thread
from torch import Tensor

from omagd.envs.battle.args import SkirmishArgs
from omagd.envs.battle.compiled import compiler, play, resident
from omagd.envs.battle.compiled import cuda as kernels
from omagd.envs.battle.compiled.resident import ResidentBattles
from omagd.envs.battle.maps import get_map
from omagd.envs.protocol import random_actions
from omagd.utils import compiling
from omagd.utils.compiling import Kernels
from omagd.utils.cuda import CUDACompiler

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
SLOTS = 5


def battles_and_reference(name, **flags):
    args = SkirmishArgs(map_name=name, **flags)
    return ResidentBattles(args.spec, args, SLOTS, CPU), JudgedByNumPy(args, SLOTS)


@pytest.mark.parametrize("name", FLAGS)
def test_battles_in_tensors_are_those_of_the_reference_bit_for_bit(monkeypatch, name):
    battles, env = battles_and_reference(name, **FLAGS[name])
    rng, ended = np.random.default_rng(0), np.ones(SLOTS, bool)
    over, n_ended = ended.copy(), 0
    for step in range(70):
        begun = ended & (rng.random(SLOTS) < 0.7)
        seeds = rng.integers(0, 2**62, SLOTS)
        battles.reset(torch.from_numpy(begun), torch.from_numpy(seeds))
        env.reset(begun, seeds)
        ended &= ~begun
        shown, seen = battles.observe(full=True), env.observe(full=True)
        if step > 3:  # all slots have begun; before, only those that have show anything
            theirs = seen.avail_actions, seen.obs, seen.full_obs, seen.state
            assert all(np.array_equal(a.numpy(), b) for a, b in zip(shown, theirs, strict=True))
        active = ~ended & (rng.random(SLOTS) < 0.9)
        actions = random_actions(seen.avail_actions, rng)
        outcome, result = battles.step(torch.from_numpy(actions), torch.from_numpy(active)), env.step(actions, active)
        over = result.terminated
        assert np.array_equal(outcome.reward.numpy(), result.reward)
        assert np.array_equal(outcome.over.numpy(), over)
        assert np.array_equal(outcome.truncated.numpy(), result.truncated)
        counts = {"battle_won": outcome.won, "battle_draw": outcome.draw, "episode_limit": outcome.limit}
        counts |= {"dead_allies": outcome.dead[0], "dead_enemies": outcome.dead[1]}
        for field, values in counts.items():
            assert np.array_equal(values.numpy()[over], result.info[field][over]), field
        ended |= over
        n_ended += int(over.sum())
    assert n_ended > 0
    assert not battles.faults.any()


@pytest.mark.parametrize("continuing", [True, False])
def test_the_step_limit_truncates_where_the_target_bootstraps(monkeypatch, continuing):
    battles, _ = battles_and_reference("3m", continuing_episode=continuing)
    everyone, stop = torch.ones(SLOTS, dtype=torch.bool), torch.ones(SLOTS, 3, dtype=torch.int64)
    battles.reset(everyone, torch.arange(SLOTS))
    battles.observe()
    battles._episodes.steps[2:] = get_map("3m").limit - 1
    outcome = battles.step(stop, everyone)
    expected = [False] * 2 + [True] * 3
    assert outcome.over.tolist() == outcome.limit.tolist() == expected
    assert outcome.truncated.tolist() == ([False] * SLOTS if not continuing else expected)


def test_an_action_that_is_not_available_is_noted_where_it_was_given(monkeypatch):
    battles, _ = battles_and_reference("3m")
    everyone = torch.ones(SLOTS, dtype=torch.bool)
    battles.reset(everyone, torch.arange(SLOTS))
    battles.observe()
    actions = torch.ones(SLOTS, 3, dtype=torch.int64)  # stop
    battles.step(actions, everyone)
    assert not battles.faults.any()
    battles.observe()
    actions[3, 1] = 0  # nothing, which is for the dead
    battles.step(actions, everyone)
    assert battles.faults.tolist() == [False, False, False, True, False]


# --- for GPUs -----------------------------------------------------------------------------------------------------


class GPULayout(ResidentBattles):
    """Battles with the memory layout that they have on a GPU, in the CPU's memory."""

    def __init__(self, name, n_slots):
        args = SkirmishArgs(map_name=name, obs_instead_of_state=name == "8m")
        super().__init__(args.spec, args, n_slots, GPU)

    def _tensor(self, array):
        return torch.from_numpy(array)


@pytest.fixture(scope="module")
def cached():
    """Let Numba keep what it compiles here for later sessions: the parts of the kernels, called from Python."""
    folder = compiler.folder
    before, numba.config.CACHE_DIR = numba.config.CACHE_DIR, str(folder.with_name(f"tests-of-{folder.name}"))
    for function in compiling._functions:
        function.enable_caching()
    numba.config.CACHE_DIR = before


@pytest.fixture
def on_gpu(monkeypatch):
    monkeypatch.setattr(kernels, "cuda", SimpleNamespace())
    monkeypatch.setattr(
        resident, "kernels_for", lambda device: Kernels(Tensor.numpy, thread_after_thread(kernels), True)
    )


@pytest.mark.parametrize("name", ["8m", "5m_vs_6m_mixed_sight6"])
def test_a_thread_per_battle_and_per_view_plays_what_the_loops_play(cached, on_gpu, monkeypatch, name):
    threads = GPULayout(name, SLOTS)
    monkeypatch.undo()
    args = SkirmishArgs(map_name=name, obs_instead_of_state=name == "8m")
    loops = ResidentBattles(args.spec, args, SLOTS, CPU)
    monkeypatch.setattr(kernels, "cuda", SimpleNamespace())
    rng, begun = np.random.default_rng(0), torch.ones(SLOTS, dtype=torch.bool)
    for _ in range(20):
        seeds, active = torch.from_numpy(rng.integers(0, 2**62, SLOTS)), torch.from_numpy(rng.random(SLOTS) < 0.8)
        shown, results = [], []
        for battles in (threads, loops):
            battles.reset(begun, seeds)
            shown.append([tensor.clone() for tensor in battles.observe(full=True)])
        assert all(torch.equal(a, b) for a, b in zip(*shown, strict=True))
        actions = torch.from_numpy(random_actions(shown[0][0].numpy(), rng))
        for battles in (threads, loops):
            results.append(battles.step(actions, active))
        assert all(a is b is None or torch.equal(a, b) for a, b in zip(*results, strict=True))
        begun = results[0].over | torch.from_numpy(rng.random(SLOTS) < 0.1)
    assert not threads.faults.any()
    threads.step(torch.zeros_like(actions), begun | True)
    assert threads.faults.any()


@pytest.fixture
def compilable(on_gpu, monkeypatch, tmp_path):
    compile_without_a_gpu(monkeypatch, tmp_path)
    monkeypatch.setattr(kernels, "cuda", numba.cuda)
    monkeypatch.setattr(kernels, "compiler", CUDACompiler(Path(kernels.__file__).parents[1], "battles", "", exact=True))


@pytest.mark.parametrize("kernel", ["reset", "step", "look"])
def test_kernels_compile_for_gpus_without_fused_operations(compilable, kernel):
    arguments = getattr(GPULayout("MMM2", SLOTS), f"_{kernel}")
    ptx = linked_ptx(kernels.compiler, kernels.KERNELS[kernel], *arguments, *[True] * (kernel == "look"))
    assert ".entry" in ptx
    assert not re.findall(r"\bfma\.", ptx)
    assert not re.findall(r"\b(div|sqrt)\.(approx|full)", ptx)


def test_kernels_are_kept_for_later_processes_or_a_line_says_why_not(compilable, capsys, tmp_path):
    folder, reset = kernels.compiler.folder, kernels.reset
    assert folder.parent == tmp_path / "omagd" / "compiled" and "once" in capsys.readouterr().err
    assert folder in Path(kernels.compiler.jitted(reset)._cache.cache_path).parents
    shutil.rmtree(folder)
    folder.write_text("no folder")
    kernels.compiler.jitted.cache_clear()
    assert not kernels.compiler.jitted(reset).targetoptions["lto"]
    assert "each start" in capsys.readouterr().err


def test_battles_are_played_in_single_precision(compilable):
    def only_play(t, state, s, k, orders, active):
        b = kernels.cuda.grid(1)
        if active[b]:
            play.play_battle(t, state, s[b], k[b], orders, b)

    tables, _, _, _, state, _, s, k, orders, _, _, active, *_ = GPULayout("MMM2", SLOTS)._step
    ptx = linked_ptx(kernels.compiler, only_play, tables, state, s, k, orders, active)
    assert re.findall(r"\.f32\b", ptx)
    assert not re.findall(r"\.f64\b", ptx)


@pytest.mark.parametrize(("kernel", "dims"), [("forward", [4, 2, 3, 2, 3]), ("backward", [4, 3, 3, 4, 4, 2])])
def test_the_recurrence_of_grus_keeps_its_numbers_in_registers(compilable, kernel, dims):
    from omagd.modules.kernels import gru_cuda

    arrays = (np.zeros([1] * n, np.float32) for n in dims)
    ptx = linked_ptx(gru_cuda.compiler, getattr(gru_cuda, kernel), *arrays)
    assert "ld.shared.v4.f32" in ptx
    assert not re.findall(r"\.f64|(ld|st)\.local", ptx)
