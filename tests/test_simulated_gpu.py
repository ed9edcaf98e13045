"""Every registered learner on a simulated GPU: acting, reconstruction, updates, tests, saving and loading.

Registries and shipped configurations are walked, so that a new learner, agent, mixer or controller comes in by itself.
"""

from __future__ import annotations

import functools
import math
from pathlib import Path
from typing import Any

import graph_toys
import numpy as np
import pytest
import torch
from plugin_toys import own_names
from simulated_gpu import DEVICE, OnGPU, simulated_gpu
from torch.utils._pytree import tree_leaves

import omagd.config
from omagd import learners, runners
from omagd.components.data import Sampler
from omagd.components.episode_buffer import EpisodeBuffer
from omagd.config.env_info import EntityLayout, EnvInfo
from omagd.config.loading import resolve
from omagd.config.schema import Config
from omagd.controllers.types import Exploration
from omagd.envs.protocol import BatchedEnv, Observation, StepResult
from omagd.learners import nq_learner
from omagd.learners.predictor_learner import PredictorLearner
from omagd.learners.synced_optimizer import SKIPPED
from omagd.learners.tokenizer_learner import TokenizerLearner
from omagd.modules.kernels.recurrent import PackedGRU
from omagd.run.checkpoint.serialization import pack
from omagd.run.checkpoint.weights import checksum, load_learner, save_learner
from omagd.run.training.build import build_mac, new_predictor, new_tokenizer
from omagd.run.training.stages.base import PretrainedModules
from omagd.run.training.stages.health import Health
from omagd.runners.rollout import EpisodeSeeds
from omagd.utils.clock import Counters
from omagd.utils.dist_utils import Dist
from omagd.utils.errors import UserError
from omagd.utils.metrics import Metrics
from omagd.utils.packing import Packing, pack_episodes

torch.set_num_threads(1)
CPU = torch.device("cpu")
PRESETS = sorted(path.stem for path in (Path(omagd.config.__file__).parent / "algs").glob("*.yaml"))
LAYOUT = EntityLayout(move_dim=2, n_enemies=2, enemy_dim=5, n_allies=2, ally_dim=5, own_dim=1)
LENGTH = 3
SMALL: dict[str, Any] = {
    **{key: value for key, value in graph_toys.SMALL.items() if key.startswith(("tokenizer", "mask"))},
    "rnn_hidden_dim": 8, "gnn_hidden_dim": 8, "mixing_embed_dim": 4, "hypernet_embed": 6, "batch_size": 4,
    "buffer_size": 16, "batch_size_run": 4, "num_workers": 0,
}  # fmt: skip


class Toy(BatchedEnv):
    """Episodes of three steps; everything that they show follows from seed and step."""

    def __init__(self, config: Config, n_slots: int) -> None:
        each = config.mac == "ddpg_mac"
        self.info = EnvInfo("toy", "toy", 3, 7, LAYOUT.obs_dim, 5, LENGTH, 5, layout=LAYOUT, agent_rewards=each)
        self.n_slots, self.t, self.seed = n_slots, np.zeros(n_slots, int), np.zeros(n_slots, int)

    def reset(self, which: np.ndarray, seeds: np.ndarray) -> None:
        self.t[which], self.seed[which] = 0, seeds[which]

    def step(self, actions: np.ndarray, active: np.ndarray) -> StepResult:
        self.t += active
        each = np.where(active[:, None], actions == 1, 0).astype(np.float32)
        ended = active & (self.t == LENGTH)
        of_agents = each if self.info.agent_rewards else None
        return StepResult(each.sum(1), ended, np.zeros_like(ended), {}, agent_reward=of_agents)

    def observe(self, full: bool = False) -> Observation:
        rng = [np.random.default_rng((int(s), int(t))) for s, t in zip(self.seed, self.t, strict=True)]
        shape = (self.info.n_agents, self.info.obs_dim)
        everything = np.stack([r.normal(size=shape).astype(np.float32) for r in rng])
        seen = everything.copy()
        seen[..., 2:7] = 0  # nobody sees the first enemy
        state = np.stack([r.normal(size=self.info.state_dim).astype(np.float32) for r in rng])
        mask = np.stack([r.random((self.info.n_agents, self.info.n_actions)) < 0.5 for r in rng])
        mask[..., 1] = True
        return Observation(seen, state, mask, everything if full else None)


def config_of(preset: str, **updates: Any) -> Config:
    environment = "snakes" if preset.startswith("snakes") else "skirmish"
    return resolve(preset, environment, {**SMALL, **updates})


class Made:
    """A controller, a learner and a runner of a configuration on a device; the same numbers for the same seed."""

    def __init__(self, config: Config, device: torch.device) -> None:
        self.config, self.device = config, device
        self.env = Toy(config, config.batch_size_run)
        products = PretrainedModules()
        if config.use_graph_reconstruction:
            products.tokenizer = new_tokenizer(config, self.env.info, device).eval()
            products.predictor = new_predictor(config, self.env.info, device).eval()
            products.predictor.bind(products.tokenizer.table())
        self.mac = build_mac(config, self.env.info, device, products)
        self.learner = learners.REGISTRY.get(config.learner)(self.mac, config, self.env.info, Dist(device=device))
        self.learner.warm_up()
        kind = runners.REGISTRY.get(config.runner)
        self.runner = kind(self.env, config, self.env.info, EpisodeSeeds(1, "train", 0))

    def play(self) -> list[Any]:
        """Return episodes (or steps) of training; half of the slots at a time where the controller can."""
        explore = Exploration(0.5, np.random.default_rng(0))
        return [e for _ in range(4) for e in self.runner.collect(self.mac, explore=explore).episodes]

    def batch(self, episodes: list[Any]) -> Any:
        """Return a batch as stage 3 draws it."""
        buffer = EpisodeBuffer(64, self.device)
        buffer.add(episodes)
        return next(Sampler(buffer, 4, np.random.default_rng(3), self.device, workers=0).batches(1))

    def weights(self) -> dict[str, torch.Tensor]:
        state = {name: module.state_dict() for name, module in self.learner.modules().items()}
        return {f"{name}.{key}": value for name, of in pack(state).items() for key, value in of.items()}


OWN = own_names(learners.REGISTRY)
KINDS = (
    "learner", "mac", "agent", "mixer", "runner", "action_selector", "gumbel_softmax", "use_graph_reconstruction",
    "use_full_obs", "double_q", "obs_agent_id", "cpu_inference", "buffer_cpu_only", "mask_predictor_config.decode",
)  # fmt: skip


def cases() -> list[tuple[str, str]]:
    """Return (configuration, learner): shipped configurations of each kind, and learners that none of them names."""
    kinds: dict[tuple[Any, ...], tuple[str, str]] = {}
    for preset in PRESETS:
        config = config_of(preset)
        kind = tuple(functools.reduce(getattr, key.split("."), config) for key in KINDS)
        kinds.setdefault(kind, (preset, config.learner))
    found = list(kinds.values())
    for name in learners.REGISTRY.names():
        if name not in {learner for _, learner in found}:
            fitting = [preset for preset in PRESETS if _fits(preset, name)]
            assert fitting or name not in OWN, name  # a plug-in may need parts that no shipped configuration has
            found += [(preset, name) for preset in fitting[:1]]
    return found


def _fits(preset: str, learner: str) -> bool:
    try:
        Made(config_of(preset, learner=learner), CPU)
    except UserError:
        return False
    return True


@pytest.mark.parametrize(("preset", "learner"), cases())
def test_a_learner_plays_learns_is_saved_and_goes_on_on_a_gpu(preset: str, learner: str, tmp_path: Path) -> None:
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
        assert all(math.isfinite(value) for value in values.values()) and "loss_td" in values
        trained = made.weights()
        pack({"learner": made.learner.state_dict(), "memory": made.mac.snapshot()})
        save_learner(made.learner, Counters(), tmp_path)
        again = Made(config, DEVICE)
        load_learner(again.learner, tmp_path)
        assert {name: checksum({"": value}) for name, value in again.weights().items()} == {
            name: checksum({"": value}) for name, value in trained.items()
        }
        again.learner.update(batch, episodes=0)
    for _ in range(2):
        on_cpu.learner.update(on_cpu.batch(episodes), episodes=0)
    if config.target_update_updates is None:  # both have copied alike
        for name, value in on_cpu.weights().items():
            torch.testing.assert_close(trained[name], value, atol=2e-4, rtol=1e-3, msg=name)


@pytest.mark.parametrize("use_gru", [False, True])
def test_pre_training_learns_measures_is_saved_and_goes_on_on_a_gpu(use_gru: bool) -> None:
    config = graph_toys.toy_config(mask_predictor_config__use_gru=use_gru, mask_predictor_config__mask_ratio=0.2)
    batch, held_out = (pack_episodes(graph_toys.toy_episodes(4, seed=seed)) for seed in (0, 1))

    def both(device: torch.device) -> list[Any]:
        info, dist = graph_toys.INFO, Dist(device=device)
        tokenizer = new_tokenizer(config, info, device)
        first = TokenizerLearner(tokenizer, config, info, dist)
        stages = [first, PredictorLearner(new_predictor(config, info, device), tokenizer, config, info, dist)]
        stages[0].tokenizer.requires_grad_(True)
        for stage in stages:
            stage.warm_up(batch.to(device))
            for _ in range(3):
                stage.update(batch.to(device))
        return stages

    def measured(stages: list[Any], device: torch.device) -> list[dict[str, float]]:
        out = []
        for stage in stages:
            metrics = Metrics()
            metrics.add(stage.evaluate(held_out.to(device)))
            out.append(metrics.reduce(Dist(device=device)))
        return out

    wanted = measured(both(CPU), CPU)
    with simulated_gpu():
        stages = both(DEVICE)
        found = measured(stages, DEVICE)
        for stage in stages:
            kept = pack({"modules": {n: m.state_dict() for n, m in stage.modules().items()}, "of": stage.state_dict()})
            for name, module in stage.modules().items():
                module.load_state_dict(kept["modules"][name])
            stage.load_state_dict(kept["of"])
            stats = stage.update(batch.to(DEVICE))
            assert stats[SKIPPED][0].item() == 0
    for one, other in zip(found, wanted, strict=True):
        assert one.keys() == other.keys(), one.keys() ^ other.keys()
        assert one == pytest.approx(other, rel=1e-3, abs=1e-5)


def test_a_step_is_skipped_on_the_device_and_the_host_does_not_wait() -> None:
    with simulated_gpu() as gpu:
        made = Made(config_of("qmix"), DEVICE)
        batch = made.batch(made.play())
        made.learner.update(batch, episodes=0)
        before = {**made.weights(), **pack({"step": made.learner.optimizer.state_dict()["state"][0]["step"]})}
        batch["reward"].view(-1)[0] = math.nan
        gpu.waits.clear()
        stats = made.learner.update(batch, episodes=0)
        assert not gpu.waits
        assert float(stats[SKIPPED][0]) == 1 and float(stats["loss_td"][1]) == 0
        after = {**made.weights(), **pack({"step": made.learner.optimizer.state_dict()["state"][0]["step"]})}
        assert all(torch.equal(value, after[name]) for name, value in before.items())


@pytest.mark.parametrize("mixer", ["qmix", "none"])
def test_in_bf16_the_recurrence_and_the_targets_stay_in_float32(mixer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under autocast cuDNN's GRU would run in fp16, even when bf16 is asked for."""
    seen: list[tuple[str, bool, set[torch.dtype]]] = []

    def spied(name: str, function: Any, places: slice) -> Any:
        def call(*args: Any) -> Any:
            kinds = {t.dtype for t in tree_leaves(args[places]) if torch.is_tensor(t) and t.is_floating_point()}
            seen.append((name, torch.is_autocast_enabled("cuda"), kinds))
            return function(*args)

        return call

    def half(self: PackedGRU, x: torch.Tensor, packing: Packing, start: Any = None) -> torch.Tensor:
        in_autocast.append(torch.is_autocast_enabled("cuda"))
        return forward(self, x.bfloat16(), packing, start)  # as autocast leaves what comes before

    in_autocast: list[bool] = []
    forward = PackedGRU.forward
    with simulated_gpu():
        made = Made(config_of("qmix", mixer=mixer, precision="bf16"), DEVICE)
        batch = made.batch(made.play())
        monkeypatch.setattr(PackedGRU, "forward", half)
        monkeypatch.setattr(torch._VF, "gru", spied("gru", torch._VF.gru, slice(None)))
        targets = nq_learner.td_lambda_targets
        monkeypatch.setattr(nq_learner, "td_lambda_targets", spied("targets", targets, slice(0, 3)))
        made.learner.update(batch, episodes=0)
    assert in_autocast == [True, True]  # the trained agent's, and the target's
    assert [name for name, *_ in seen] == ["gru", "gru", "targets"]
    assert all(not autocast and kinds == {torch.float32} for _, autocast, kinds in seen), seen
