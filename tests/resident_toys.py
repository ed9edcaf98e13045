"""Runners, controllers and comparisons for the tests of rounds that stay on a device."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numba
import numpy as np
import pytest
import torch
from graph_toys import SMALL as SMALL_GRAPHS
from q_toys import toy_config
from simulated_gpu import RECORDING, OnGPU
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from omagd import controllers, runners
from omagd.components import slot_kernels
from omagd.config.env_info import EnvInfo
from omagd.config.schema import Config
from omagd.controllers.types import Exploration
from omagd.envs.battle.args import SkirmishArgs
from omagd.envs.battle.compiled import resident
from omagd.envs.battle.skirmish_env import SkirmishEnv
from omagd.modules.graph_reconstructers.predictor import MaskPredictor
from omagd.modules.graph_reconstructers.token_reconstructor import TokenReconstructor
from omagd.modules.graph_reconstructers.tokenizer import Tokenizer
from omagd.runners.rollout import Rollout
from omagd.utils.cuda import CUDACompiler
from omagd.utils.packing import RecordedEpisode
from omagd.utils.seeding import EpisodeSeeds

CPU = torch.device("cpu")
FLAGS = {
    "3m": {"continuing_episode": True},
    "2s3z": {"obs_last_action": True, "obs_timestep_number": True, "state_timestep_number": True},
    "MMM2": {"reward_only_positive": False, "obs_pathing_grid": True, "obs_terrain_height": True},
    "corridor": {"obs_instead_of_state": True, "state_last_action": False},
    "so_many_baneling": {"reward_sparse": True, "obs_all_health": False},
    "8m_vs_9m": {"start": "mixed", "sight_range": 6},
    "3s_vs_5z": {"start": "hidden", "sight_range": 4.5},
    "2c_vs_64zg": {"reward_scale": False, "difficulty": "3", "obs_own_health": False},
}
SLOTS = 6


def game(
    name: str = "3m", runner: str = "resident", device: torch.device = CPU, slots: int = SLOTS, env: Any = None,
    stream: Any = None, **updates: Any,
) -> tuple[Any, Any]:  # fmt: skip
    """Return a runner and the controller that plays; with reconstruction where `updates` say so."""
    env = env or SkirmishEnv(SkirmishArgs(map_name=name, continuing_episode=True), slots)
    graphs = {**SMALL_GRAPHS, "learner": "nq_graph_learner"} if updates.get("use_graph_reconstruction") else {}
    updates = {"mac": "n_mac", "rnn_hidden_dim": 16, **graphs, **updates}
    config = toy_config(runner=runner, **{"batch_size_run": slots, **updates})
    torch.manual_seed(0)
    guesses = reconstructor_of(config, env.info, device) if config.use_graph_reconstruction else None
    mac = controllers.REGISTRY.get(config.mac)(config, env.info, device, guesses)
    with torch.no_grad():
        for parameter in mac.agent.parameters():
            parameter.mul_(3)  # values that differ between actions
    kind = runners.REGISTRY.get(runner)
    return kind(env, config, env.info, stream or EpisodeSeeds(1, "train")), mac


def reconstructor_of(config: Config, info: EnvInfo, device: torch.device) -> TokenReconstructor:
    """Return modules with random weights that guess far from zero."""
    assert info.layout is not None
    tokenizer = Tokenizer(config.tokenizer_config, info.layout)
    codes = config.tokenizer_config.n_codes
    predictor = MaskPredictor(config.mask_predictor_config, codes, info.layout, info.episode_limit)
    with torch.no_grad():
        predictor.head.weight.mul_(40)
    predictor.bind(tokenizer.table())
    return TokenReconstructor(tokenizer.to(device), predictor.to(device), config, info)


def played(plays: Any, mac: Any, *, explore: Exploration | None, **options: Any) -> Rollout:
    """Play, and copy the episodes, whose memory the runner uses again."""
    rollout = plays.run(mac, explore=explore, **options)
    kept = [RecordedEpisode({name: rows.clone() for name, rows in e.items()}, e.meta) for e in rollout.episodes]
    rollout.episodes = kept
    return rollout


def explore(epsilon: float) -> Exploration:
    """Return how to explore."""
    return Exploration(epsilon, np.random.default_rng(0))


def assert_same(one: Rollout, other: Rollout, rounded: tuple[str, ...] = (), ordered: bool = True) -> None:
    """Compare rounds bit for bit; the fields `rounded` may differ by the rounding of a sum.

    ordered: whether the episodes are in one order, which several of each slot are not.
    """
    if ordered:
        assert one.stats == other.stats
    logs, kept = ([rollout.log for rollout in (one, other)], [rollout.episodes for rollout in (one, other)])
    if not ordered:
        assert one.stats == {name: pytest.approx(pair) for name, pair in other.stats.items()}
        logs = [sorted(log, key=lambda entry: entry["seed"]) for log in logs]
        kept = [sorted(episodes, key=lambda e: e.meta.seed) for episodes in kept]
    assert logs[0] == logs[1]
    for a, b in zip(*kept, strict=True):
        assert a.meta == b.meta
        np.testing.assert_equal(a.meta.outcome, b.meta.outcome)  # which equality leaves out; NaN if unknown
        assert list(a) == list(b)
        for name in a:
            assert a[name].dtype == b[name].dtype
            if name in rounded:
                torch.testing.assert_close(a[name], b[name], atol=4e-3, rtol=4e-3)
            else:
                assert torch.equal(a[name], b[name]), name


def on_simulated_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let kernels for GPUs be the CPU's, on the memory of simulated tensors."""
    for module in (resident, slot_kernels):
        loops = module.kernels_for(CPU)
        there = loops._replace(
            view=lambda tensor: tensor.value.numpy() if isinstance(tensor, OnGPU) else tensor.numpy(),
            run=partial(recorded, loops.run),
        )
        monkeypatch.setattr(module, "kernels_for", lambda device, there=there: there)


def recorded(kernel: Any, *args: Any) -> None:
    """Run a kernel, which a simulated graph that is being captured repeats."""
    for graph in RECORDING:
        arrays = [torch.from_numpy(leaf) for leaf in tree_leaves(args) if isinstance(leaf, np.ndarray)]
        graph._kept += [(array, array.clone()) for array in arrays]
        graph.work.append((kernel, args, {}, None))
    kernel(*args)


def thread_after_thread(module: Any) -> Any:
    """Return what runs a module's kernels for GPUs here, all threads of whole blocks in turn."""

    def run(name: str, threads: int, *args: Any) -> None:
        for thread in range(-(-threads // module.THREADS) * module.THREADS):
            block, lane = (SimpleNamespace(x=place) for place in divmod(thread, module.THREADS))
            module.cuda = SimpleNamespace(grid=lambda _, thread=thread: thread, blockIdx=block, threadIdx=lane)
            module.KERNELS[name](*args)

    return run


def compile_without_a_gpu(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    """Let kernels compile without a GPU: Numba asks a device only which architecture it has."""
    if find_spec("numba_cuda") is None:
        pytest.skip("numba-cuda is not installed")
    from numba.cuda import dispatcher
    from numba.cuda.cudadrv import devices

    card = SimpleNamespace(compute_capability=(9, 0))
    monkeypatch.setattr(dispatcher, "get_current_device", lambda: card)
    monkeypatch.setattr(devices, "get_context", lambda: SimpleNamespace(device=card))
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))


def linked_ptx(compiler: CUDACompiler, function: Any, *arguments: Any) -> str:
    """Return the PTX of a kernel for compute capability 9.0, linked as it is when it is launched."""
    from numba.cuda.dispatcher import _Kernel

    made = compiler.jitted(function)
    with compiler.compiling():
        library = _Kernel(made.py_func, tuple(map(numba.typeof, arguments)), **made.targetoptions)._codelibrary
        return library.get_lto_ptx((9, 0)) if library._lto else library.get_asm_str((9, 0))


class FixedShapes(TorchDispatchMode):
    """Rejects operations whose result's size, or Python value, depends on values: a host would wait for these."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation of fixed shapes."""
        indexing = func._schema.name in {"aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_"}
        by_mask = any(t.dtype in (torch.bool, torch.uint8) for t in tree_leaves(args[1:2]) if torch.is_tensor(t))
        dynamic = {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output} & set(func.tags)
        if (indexing and by_mask) or (dynamic and not indexing):
            raise AssertionError(f"{func} reads values")
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def fixed_shapes() -> Iterator[None]:
    """Reject what a tick must not do."""
    with FixedShapes(), torch.no_grad():
        yield
