"""Every registered learner on a simulated GPU: acting, reconstruction, updates, tests, saving and loading.

All shipped configurations and all registered learners are tested.
"""

from __future__ import annotations

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
from omagd.components import td_lambda
from omagd.components.data import Sampler
from omagd.components.episode_buffer import EpisodeBuffer
from omagd.config.env_info import EntityLayout, EnvInfo, StateLayout
from omagd.config.loading import resolve
from omagd.config.schema import Config
from omagd.controllers.types import Exploration
from omagd.envs.protocol import BatchedEnv, Observation, StepResult
from omagd.learners.predictor_learner import PredictorLearner
from omagd.learners.synced_optimizer import SKIPPED
from omagd.learners.tokenizer_learner import TokenizerLearner
from omagd.modules.kernels.recurrent import PackedGRU
from omagd.run.checkpoint.serialization import pack
from omagd.run.checkpoint.weights import checksum, load_learner, save_learner
from omagd.run.training.build import build_mac, new_predictor, new_tokenizer
from omagd.run.training.stages.base import PretrainedModules
from omagd.run.training.stages.health import Health
from omagd.run.training.tasks import episode_starts
from omagd.utils.clock import Counters
from omagd.utils.dist_utils import Dist
from omagd.utils.errors import UserError
from omagd.utils.metrics import Metrics
from omagd.utils.packing import pack_episodes

torch.set_num_threads(1)
CPU = torch.device("cpu")
PRESETS = sorted(path.stem for path in (Path(omagd.config.__file__).parent / "algs").glob("*.yaml"))
LAYOUT = EntityLayout(move_dim=2, n_enemies=2, enemy_dim=5, n_allies=2, ally_dim=5, own_dim=1)
UNITS = StateLayout(n_allies=3, ally_dim=1, n_enemies=2, enemy_dim=1)
LENGTH = 3
SMALL: dict[str, Any] = {
    **{key: value for key, value in graph_toys.SMALL.items() if key.startswith(("tokenizer", "mask"))},
    "rnn_hidden_dim": 8, "gnn_hidden_dim": 8, "mixing_embed_dim": 4, "hypernet_embed": 6, "batch_size": 4,
    "buffer_size": 16, "batch_size_run": 4, "num_workers": 0,
}  # fmt: skip


class Toy(BatchedEnv):
    """Episodes of three steps; seed and step determine all observations."""

    def __init__(self, config: Config, n_slots: int) -> None:
        each = config.mac == "ddpg_mac"
        facts: Any = {"layout": LAYOUT, "state_layout": UNITS, "agent_rewards": each}
        self.info = EnvInfo("toy", "toy", 3, 7, LAYOUT.obs_dim, 5, LENGTH, 5, **facts)
        self.n_slots, self.t, self.seed = n_slots, np.zeros(n_slots, int), np.zeros(n_slots, int)

    def reset(self, which: np.ndarray, seeds: np.ndarray) -> None:
        self.t[which], self.seed[which] = 0, seeds[which]

    def step(self, actions: np.ndarray, active: np.ndarray) -> StepResult:
        self.t += active
        each = np.where(active[:, None], actions == 1, 0).astype(np.float32)
        ended = active & (self.t == LENGTH)
        of_agents = each if self.info.agent_rewards else None
        results = {"battle_won": each[:, 0]}
        return StepResult(each.sum(1), ended, np.zeros_like(ended), results, agent_reward=of_agents)

    def observe(self, full: bool = False) -> Observation:
        rngs = [np.random.default_rng((int(s), int(t))) for s, t in zip(self.seed, self.t, strict=True)]
        n, info = self.info.n_agents, self.info
        everything = np.stack([rng.normal(size=(n, info.obs_dim)) for rng in rngs]).astype(np.float32)
        seen = everything.copy()
        seen[..., 2:7] = 0  # no agent sees the first enemy
        state = np.stack([rng.normal(size=info.state_dim) for rng in rngs]).astype(np.float32)
        mask = np.stack([rng.random((n, info.n_actions)) < 0.5 for rng in rngs])
        mask[..., 1] = True
        return Observation(seen, state, mask, everything if full else None)


def config_of(preset: str, **updates: Any) -> Config:
    environment = "snakes" if preset.startswith("snakes") else "skirmish"
    groups = {"group_size": 2} if preset == "rloo" else {}
    return resolve(preset, environment, {**SMALL, **groups, **updates})


class Made:
    """A controller, a learner and a runner of a configuration on a device; equal numbers for equal seeds."""

    def __init__(self, config: Config, device: torch.device) -> None:
        self.device, env = device, Toy(config, config.batch_size_run)
        pretrained = PretrainedModules()
        if config.use_graph_reconstruction:
            pretrained.tokenizer = new_tokenizer(config, env.info, device).eval()
            pretrained.predictor = new_predictor(config, env.info, device).eval()
            if config.mask_predictor_config.kind == "masked":  # the others read no tokens
                pretrained.predictor.bind(pretrained.tokenizer.table())
        self.mac = build_mac(config, env.info, device, pretrained)
        self.learner = learners.REGISTRY.get(config.learner)(self.mac, config, env.info, Dist(device=device))
        self.learner.warm_up()
        starts = episode_starts(config, env.info, "train", 0)
        self.runner = runners.REGISTRY.get(config.runner)(env, config, env.info, starts)

    def play(self) -> list[Any]:
        """Return episodes (or steps) of training."""
        explore = Exploration(0.5, np.random.default_rng(0))
        return [
            e
            for _ in range(4)
            for e in self.runner.collect(self.mac, explore=explore, full_obs=self.mac.wants_full_obs).episodes
        ]

    def batch(self, episodes: list[Any]) -> Any:
        """Return a batch as stage 3 draws it."""
        buffer = EpisodeBuffer(64, self.device)
        buffer.add(episodes)
        if self.learner.data == "on_policy":  # the first ones, which groups consist of
            return buffer.batch(range(4)).to(self.device)
        return next(Sampler(buffer, 4, np.random.default_rng(3), self.device, workers=0).batches(1))

    def weights(self) -> dict[str, torch.Tensor]:
        state = {name: module.state_dict() for name, module in self.learner.modules().items()}
        return {f"{name}.{key}": value for name, of in pack(state).items() for key, value in of.items()}


def cases() -> list[tuple[str, str]]:
    """Return (configuration, learner): all shipped configurations, and learners that none of them names."""
    found = [(preset, config_of(preset).learner) for preset in PRESETS]
    for name in sorted({*learners.REGISTRY.names()} - {learner for _, learner in found}):
        fitting = next((preset for preset in PRESETS if _fits(preset, name)), "")
        assert fitting or name not in own_names(learners.REGISTRY), name  # a plug-in may need parts of its own
        found += [(fitting, name)] if fitting else []
    return found


def _fits(preset: str, learner: str) -> bool:
    try:
        Made(config_of(preset, learner=learner), CPU)
    except UserError:
        return False
    return True


@pytest.mark.parametrize(("preset", "learner"), cases())
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
        for name, value in on_cpu.weights().items():
            torch.testing.assert_close(trained[name], value, atol=2e-4, rtol=1e-3, msg=name)


@pytest.mark.parametrize("use_gru", [False, True])
def test_pre_training_learns_measures_and_continues_on_a_gpu(use_gru: bool) -> None:
    batch, held_out = (pack_episodes(graph_toys.toy_episodes(4, seed=seed)) for seed in (0, 1))

    def trained(device: torch.device) -> tuple[list[Any], list[dict[str, float]]]:
        """Return the learners of both stages after some updates, and their metrics."""
        config = graph_toys.toy_config(mask_predictor_config__use_gru=use_gru, mask_predictor_config__mask_ratio=0.2)
        info, dist = graph_toys.INFO, Dist(device=device)
        tokenizer = new_tokenizer(config, info, device)
        stages: list[Any] = [TokenizerLearner(tokenizer, config, info, dist)]
        stages += [PredictorLearner(new_predictor(config, info, device), tokenizer, config, info, dist)]
        tokenizer.requires_grad_(True)
        found = []
        for stage in stages:
            stage.warm_up(batch.to(device))
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


@pytest.mark.parametrize("mixer", ["qmix", "none"])
def test_in_bf16_the_recurrence_and_the_targets_stay_in_float32(mixer: str, monkeypatch: pytest.MonkeyPatch) -> None:
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
        made = Made(config_of("qmix", mixer=mixer, precision="bf16"), DEVICE)
        batch = made.batch(made.play())
        # Autocast leaves the input of the recurrence in bf16.
        spy(PackedGRU, "forward", slice(0), lambda args: (args[0], args[1].bfloat16(), *args[2:]))
        spy(torch._VF, "gru", slice(None))
        spy(td_lambda, "td_lambda_targets", slice(0, 3))
        made.learner.update(batch, episodes=0)
    network = [("forward", True, set()), ("gru", False, {torch.float32})]
    assert seen == [*network, *network, ("td_lambda_targets", False, {torch.float32})]
