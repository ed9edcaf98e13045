"""Every registered learner on a simulated GPU: acting, reconstruction, updates, tests, saving and loading.

Shipped configurations of every controller, agent and runner, and all registered learners are tested.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import graph_toys
import pytest
import torch
from preset_toys import CPU, Made, cases, config_of
from simulated_gpu import DEVICE, OnGPU, simulated_gpu
from torch.utils._pytree import tree_leaves

from omagd.learners.predictor_learner import PredictorLearner
from omagd.learners.synced_optimizer import SKIPPED
from omagd.learners.tokenizer_learner import TokenizerLearner
from omagd.modules.ops import PackedGRU
from omagd.run.checkpoint.store import pack
from omagd.run.checkpoint.weights import checksum, load_learner, save_learner
from omagd.run.reporting.metrics import Counters, Metrics
from omagd.run.training.build import new_predictor, new_tokenizer
from omagd.run.training.stages.base import Health
from omagd.utils import packing
from omagd.utils.dist_utils import Dist
from omagd.utils.packing import pack_episodes


@pytest.mark.parametrize(("preset", "learner"), cases(("mac", "agent", "runner", "use_graph_reconstruction")))
def test_a_learner_plays_learns_is_saved_and_continues_on_a_gpu(preset: str, learner: str, tmp_path: Path) -> None:
    config = config_of(preset, learner=learner)
    on_cpu = Made(config, CPU)
    episodes = on_cpu.play()
    with simulated_gpu() as gpu:
        made = Made(config, DEVICE)
        assert all(isinstance(p, OnGPU) for module in made.learner.modules().values() for p in module.parameters())
        played = made.play()
        assert len(played) == len(episodes) and all(not isinstance(v, OnGPU) for v in played[0].values())
        made.runner.drain(made.mac, explore=None)
        made.runner.run(made.mac, explore=None, keep=False)  # a test
        batch, metrics, health = made.batch(episodes), Metrics(), Health(config, "lr")
        made.learner.update(batch, episodes=0)
        gpu.waits.clear()
        metrics.add(health.note(made.learner.update(batch, episodes=10**6)))
        assert not gpu.waits, gpu.waits
        values = metrics.reduce(Dist(device=DEVICE))
        assert all(math.isfinite(value) for value in values.values()) and made.learner.loss_name in values
        pack({"learner": made.learner.state_dict(), "memory": made.mac.snapshot()})
        save_learner(made.learner, Counters(), tmp_path)
        again, trained = Made(config, DEVICE), made.weights()
        load_learner(again.learner, tmp_path)
        assert checksum(again.weights()) == checksum(trained)
        again.learner.update(batch, episodes=0)
    for _ in range(2):
        on_cpu.learner.update(on_cpu.batch(episodes), episodes=0)
    if config.target_update_updates is None:  # otherwise only the GPU's targets are copied
        torch.testing.assert_close(trained, on_cpu.weights(), atol=2e-4, rtol=1e-3)


@pytest.mark.parametrize("use_gru", [False, True])
def test_pre_training_learns_measures_and_continues_on_a_gpu(use_gru: bool) -> None:
    batch, held_out = (pack_episodes(graph_toys.toy_episodes(4, seed=seed)) for seed in (0, 1))

    def trained(device: torch.device) -> tuple[list[Any], list[dict[str, float]]]:
        """Return the learners of both stages after some updates, and their metrics."""
        config = graph_toys.toy_config(mask_predictor_config__use_gru=use_gru)
        info, dist = graph_toys.INFO, Dist(device=device)
        tokenizer = new_tokenizer(config, info, device)
        stages: list[Any] = [TokenizerLearner(tokenizer, config, info, dist)]
        stages += [PredictorLearner(new_predictor(config, info, device), tokenizer, config, info, dist)]
        tokenizer.requires_grad_(True)
        found = []
        for stage in stages:
            stage.warm_up()
            for _ in range(3):
                stage.update(batch.to(device))
            metrics = Metrics()
            metrics.add(stage.evaluate(held_out.to(device)))
            found.append(metrics.reduce(dist))
        return stages, found

    _, wanted = trained(CPU)
    with simulated_gpu():
        stages, found = trained(DEVICE)
        for stage in stages:
            kept = pack({"modules": {n: m.state_dict() for n, m in stage.modules().items()}, "of": stage.state_dict()})
            for name, module in stage.modules().items():
                module.load_state_dict(kept["modules"][name])
            stage.load_state_dict(kept["of"])
            assert stage.update(batch.to(DEVICE))[SKIPPED][0].item() == 0
    for one, other in zip(found, wanted, strict=True):
        assert one == pytest.approx(other, rel=1e-3, abs=1e-5)


def test_a_step_is_skipped_on_the_device_and_the_host_does_not_wait() -> None:
    with simulated_gpu() as gpu:
        made = Made(config_of("qmix"), DEVICE)
        batch = made.batch(made.play())
        made.learner.update(batch, episodes=0)
        step = made.learner.optimizer.state_dict()["state"][0]["step"]
        before = checksum({**made.weights(), **pack({"step": step})})
        batch["reward"].view(-1)[0] = math.nan
        gpu.waits.clear()
        stats = made.learner.update(batch, episodes=0)
        assert not gpu.waits
        assert float(stats[SKIPPED][0]) == 1 and float(stats["loss_td"][1]) == 0
        step = made.learner.optimizer.state_dict()["state"][0]["step"]
        assert checksum({**made.weights(), **pack({"step": step})}) == before


def test_in_bf16_the_recurrence_and_the_targets_stay_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under autocast cuDNN's GRU would run in fp16, even when bf16 is requested."""
    seen: list[tuple[str, bool, set[torch.dtype]]] = []

    def spy(place: Any, name: str, shown: slice, given: Any = lambda args: args) -> None:
        """Record autocast and types of the arguments `shown`; call the function with `given(arguments)`."""
        function = getattr(place, name)

        def call(*args: Any) -> Any:
            kinds = {t.dtype for t in tree_leaves(args[shown]) if torch.is_tensor(t) and t.is_floating_point()}
            seen.append((name, torch.is_autocast_enabled("cuda"), kinds))
            return function(*given(args))

        monkeypatch.setattr(place, name, call)

    with simulated_gpu():
        made = Made(config_of("qmix", precision="bf16"), DEVICE)
        batch = made.batch(made.play())
        # Autocast leaves the input of the recurrence in bf16.
        spy(PackedGRU, "forward", slice(0), lambda args: (args[0], args[1].bfloat16(), *args[2:]))
        spy(torch._VF, "gru", slice(None))
        spy(packing, "td_lambda_targets", slice(0, 3))
        made.learner.update(batch, episodes=0)
    network = [("forward", True, set()), ("gru", False, {torch.float32})]
    assert seen == [*network, *network, ("td_lambda_targets", False, {torch.float32})]
