"""Kernels of slots: actions and rows are those of plain Python, on a CPU and as threads of a GPU."""

from __future__ import annotations

import itertools
import math
import re

import numba
import pytest
import torch
from resident_toys import CPU, compile_without_a_gpu, linked_ptx, thread_after_thread

from omagd.components import slot_kernels
from omagd.components.action_selectors import EpsilonGreedy, Greedy
from omagd.components.slot_kernels import KERNELS, RowWriter, kernels_for
from omagd.utils.cuda import CUDACompiler
from omagd.utils.seeding import FACTORS, GOLDEN

WORD = 2**64 - 1


@pytest.fixture(params=["loops", "threads"])
def kernels(request, monkeypatch):
    if request.param == "threads":
        monkeypatch.setattr(slot_kernels, "cuda", None)
        threads = kernels_for(CPU)._replace(run=thread_after_thread(slot_kernels))
        monkeypatch.setattr(slot_kernels, "kernels_for", lambda device: threads)


def drawn(number, key):
    x = ((number + 1) * GOLDEN + key) & WORD
    for shift, factor in zip((30, 27), FACTORS, strict=True):
        x = (x ^ x >> shift) * factor & WORD
    return (x >> 11) / 2**53


def expected(q, available, epsilon, key, step):
    """Return the action of each agent of one slot."""
    for i, (values, can) in enumerate(zip(q, available, strict=True)):
        first = 2 * (step * len(q) + i)
        masked = [value if yes else -math.inf for value, yes in zip(values, can, strict=True)]
        nan = [a for a, value in enumerate(masked) if math.isnan(value)]
        best = nan[0] if nan else masked.index(max(masked))
        if drawn(first, key) < epsilon:
            options = [a for a, yes in enumerate(can) if yes] or [0]
            best = options[math.floor(drawn(first + 1, key) * sum(can))]
        yield best


@pytest.mark.parametrize("kind", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_actions_are_those_of_plain_python_bit_for_bit(kernels, kind):
    """With equal values, NaN, infinities, and agents without any available action."""
    torch.manual_seed(0)
    values = torch.tensor([-math.inf, math.nan, math.inf, 0.0, 1.0, 1.0 + 1e-12, -2.0, 3.0], dtype=torch.float64)
    odds = torch.tensor([1, 0.3, 0.3, 4, 4, 4, 4, 4])
    q = values[torch.multinomial(odds, 40 * 3 * 7, replacement=True)].view(40, 3, 7).to(kind)
    available = torch.rand(40, 3, 7) < torch.rand(40, 3, 1)
    key, step = torch.randint(-(2**62), 2**62, (40,)) * 2 + 1, torch.randint(200, (40,))
    for selector, epsilon in itertools.product((Greedy(), EpsilonGreedy()), (-1.0, 0.0, 0.4, 1.0)):
        chosen, _ = selector.on_device(q, available, torch.tensor(epsilon).double(), key, step)
        share = epsilon if type(selector) is EpsilonGreedy else -1.0
        slots = zip(*(each.tolist() for each in (q, available)), key.tolist(), step.tolist(), strict=True)
        assert chosen.tolist() == [[*expected(a, b, share, k, t)] for a, b, k, t in slots]
        if share <= 0:
            assert torch.equal(chosen, q.masked_fill(~available, -torch.inf).argmax(-1))


FROM = {torch.int64: torch.uint8, torch.bool: torch.uint8}  # what rows store as another type


def test_rows_are_written_where_they_belong(kernels):
    """Fields of all types, more than one launch takes; values that are no field, or lie apart in memory."""
    kinds = [torch.float32] * 6 + [torch.float64, torch.float16, torch.int16, torch.int64, torch.bool, torch.bfloat16]
    slots, episodes, steps = 9, 12, 5
    values = {
        f"{i}": (torch.randn(2, i + 1, slots) * 40).abs().to(kind).permute(2, 1, 0) for i, kind in enumerate(kinds)
    }
    values |= {"scalar": torch.randn(slots), "wide": torch.randn(slots, 3, 50), "other": torch.ones(slots)}
    rows = {
        name: torch.ones(episodes, steps, *value.shape[1:], dtype=FROM.get(value.dtype, value.dtype))
        for name, value in values.items() if name != "other"
    }  # fmt: skip
    wanted = {name: row.clone() for name, row in rows.items()}
    episode, step = torch.randperm(episodes)[:slots], torch.randint(steps, (slots,))
    RowWriter(rows, CPU).write(values, episode, step)
    for name, row in wanted.items():
        row[episode, step] = values[name].to(row.dtype)
        assert torch.equal(rows[name], row), name
    RowWriter({}, CPU).write(values, episode, step)


@pytest.mark.parametrize("kind", [torch.float32, torch.float64])
def test_kernels_compile_for_gpus_and_need_no_memory_of_their_own(monkeypatch, tmp_path, kind):
    compile_without_a_gpu(monkeypatch, tmp_path)
    monkeypatch.setattr(slot_kernels, "cuda", numba.cuda)
    compiler, made = CUDACompiler(slot_kernels.SOURCE, slot_kernels.WHAT, "", exact=True), {}

    def compiled(name, threads, *args):
        made[name] = linked_ptx(compiler, KERNELS[name], *args)

    found = kernels_for(CPU)._replace(run=compiled)
    monkeypatch.setattr(slot_kernels, "kernels_for", lambda device: found)
    q, number = torch.zeros(2, 3, 4, dtype=kind), torch.zeros(2, dtype=torch.int64)
    EpsilonGreedy().on_device(q, q == 0, torch.tensor(0.5), number, number)
    RowWriter({"q": q.view(1, 2, 3, 4)}, CPU).write({"q": q}, number, number)
    assert [*made] == ["choose", "write"]
    for ptx in made.values():
        assert ".entry" in ptx
        assert not re.findall(r"\bfma\.|\.local\b", ptx)
