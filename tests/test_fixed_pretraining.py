"""Updates of fixed shapes in stages 1 and 2: those of packed batches, without a value that the host reads."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from graph_toys import INFO, graph_learner, toy_config, toy_episodes
from q_toys import equal, state_of
from simulated_gpu import DEVICE, simulated_gpu, simulated_graphs

from omagd.learners.predictor_learner import PredictorLearner
from omagd.learners.pretraining import few
from omagd.learners.tokenizer_learner import TokenizerLearner
from omagd.resident.replay import ResidentBuffer
from omagd.resident.updates import WARM_UP, FixedUpdates
from omagd.run.training.build import new_predictor, new_tokenizer
from omagd.utils.dist_utils import Dist

CPU, HELD, BATCH = torch.device("cpu"), 12, 5
CASES: dict[str, dict[str, Any]] = {
    "stage1": {"tokenizer_config__dead_code_threshold": 0.6},
    "stage1 in parts": {"tokenizer_config__dead_code_threshold": 0.6, "graph_frames_at_once": 30},
    "stage2": {},
    "stage2 in parts": {"graph_frames_at_once": 20, "stacked_steps": 3, "stacked_strip": 1},
    "stage2 GRU": {"use_gru": True, "last_seen": False, "code_features": False},
}


def stored(device: torch.device = CPU) -> ResidentBuffer:
    """Return a full buffer whose first episode was replaced, one of them without a living agent."""
    buffer = ResidentBuffer(HELD, device, INFO.episode_limit + 1)
    episodes = toy_episodes(HELD + 1, seed=2)
    episodes[4] = {name: torch.zeros_like(value) for name, value in episodes[4].items()}
    buffer.add(episodes)
    return buffer


def draws(count: int) -> list[list[int]]:
    rng = np.random.default_rng(0)
    return [[3], *(rng.choice(HELD, BATCH, replace=False).tolist() for _ in range(count))]


@pytest.mark.parametrize("case", CASES)
def test_updates_are_those_of_packed_batches(case: str) -> None:
    """The same codebook, codes and weights; dead codes revived on the way, and first an update without a sample."""
    packed, fixed = (graph_learner(case.split()[0], **CASES[case]) for _ in range(2))
    buffer, updates = stored(), FixedUpdates(fixed)
    before, placed, place = state_of(packed), [], fixed.tokenizer.place
    fixed.tokenizer.place = lambda codes, *given: (placed.append(len(codes)), place(codes, *given))
    for indices in draws(6):
        wanted, found = packed.update(buffer.batch(indices)), updates.update(buffer.fixed(indices), episodes=0)
        found = {name: found[name] for name in wanted}
        torch.testing.assert_close(found, wanted, atol=1e-10, rtol=0, check_dtype=False)
    assert not equal(before, one := state_of(packed))
    torch.testing.assert_close(state_of(fixed), one, atol=1e-10, rtol=0)
    assert packed.updates == fixed.updates == 7
    assert len(placed) >= 2 or "stage2" in case, "no code was revived"


@pytest.mark.parametrize("case", CASES)
def test_an_update_waits_for_nothing_and_copies_nothing_but_its_inputs(case: str) -> None:
    """So a graph of it can be captured. Dead codes are looked for between updates, and the host waits then."""
    with simulated_gpu() as gpu:
        made = on_a_gpu(case, tokenizer_config__revive_interval=0)
        buffer, updates = stored(DEVICE), FixedUpdates(made)
        updates.update(buffer.fixed(draws(1)[1]), episodes=0)
        gpu.waits.clear()
        updates.update(draw := buffer.fixed(draws(2)[2]), episodes=0)
        assert not gpu.waits, gpu.waits
        inputs = updates._load(made.fixed_inputs(draw))
        gpu.sent.clear()
        made.learn_fixed(draw, inputs)
        assert not gpu.sent, gpu.sent


def on_a_gpu(case: str, **changes: Any) -> Any:
    config, dist = toy_config(**CASES[case], **changes), Dist(device=DEVICE)
    torch.manual_seed(0)
    tokenizer = new_tokenizer(config, INFO, DEVICE).double()
    if "stage1" in case:
        return TokenizerLearner(tokenizer, config, INFO, dist)
    return PredictorLearner(new_predictor(config, INFO, DEVICE).double(), tokenizer, config, INFO, dist)


@pytest.mark.parametrize("case", ["stage1", "stage2 in parts"])
def test_a_graph_learns_what_its_update_learns(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With codes that are revived between replays. Without memory for it, packed batches are learned from."""
    with simulated_graphs():
        graph, plain, short = (FixedUpdates(on_a_gpu(case)) for _ in range(3))
        monkeypatch.setattr(plain, "_capture", lambda shape, draw, inputs: plain._aside(draw, inputs))
        buffer, (_, drawn) = stored(DEVICE), draws(1)
        for number in range(WARM_UP + 3):
            for each in (graph, plain, short):
                if each is short and number == WARM_UP:
                    monkeypatch.setattr(short, "_aside", no_memory)
                each.update(buffer.fixed(drawn), episodes=0)
        assert [shape.graph is None for shape in graph._shapes.values()] == [False]
        states = [{n: v.to(CPU) for n, v in state_of(each._learner).items()} for each in (graph, plain, short)]
    assert equal(*states[:2]) and short._packs
    torch.testing.assert_close(states[2], states[1], atol=1e-8, rtol=0)


def no_memory(*_: Any) -> Any:
    raise torch.OutOfMemoryError("no memory for the same update without a graph")


def test_updates_have_few_shapes() -> None:
    sizes = [few(count) for count in range(1, 2049)]
    assert len(set(sizes)) < 45 and all(n <= size <= 1.25 * n for n, size in enumerate(sizes, start=1))
