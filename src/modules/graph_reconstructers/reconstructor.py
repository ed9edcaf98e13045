"""Stage 3: reconstruct what agents do not see with the frozen tokenizer and predictor, step by step while acting.

At each step: tokens of the seen nodes, MASK for the others, predict, decode, and write the decoded features only where
nothing was seen; seen features pass bit for bit. The result is rounded and stored with the step, and agents act on the
stored values, so that learning reads the same bits. Also here: what is saved beside the weights of both modules, and
the check that loaded weights fit.

Shapes: B slots, n agents, R = B·n rows, N nodes, D features, F frames with a missing node, M missing nodes.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from omagd.config.env_info import EnvInfo
from omagd.config.schema import Config
from omagd.modules.graph_reconstructers import REGISTRY, pretraining
from omagd.modules.graph_reconstructers.belief import FIELD, input_columns, nothing
from omagd.modules.graph_reconstructers.filling import Reconstruction
from omagd.modules.graph_reconstructers.frozen import FrozenPredictor, FrozenTokenizer
from omagd.modules.graph_reconstructers.graphs import GraphTables
from omagd.modules.graph_reconstructers.history import SlotHistory
from omagd.modules.graph_reconstructers.predictor import Guess, MaskPredictor
from omagd.modules.graph_reconstructers.sampling import EpisodeNoise, places
from omagd.modules.graph_reconstructers.tokenizer import Tokenizer
from omagd.utils.compiling import compiled_or_reference
from omagd.utils.errors import UserError

if TYPE_CHECKING:
    from omagd.modules.graph_reconstructers.compiled import CompiledTick

# Keys that determine the shape or the meaning of the weights; the others may change between stages.
TOKENIZER_SHAPE = ("n_codes", "code_dim", "hidden_dim", "n_layers", "distance")
PREDICTOR_SHAPE = (
    "d_model", "n_layers", "n_heads", "feedforward_dim", "stacked_steps", "stacked_strip", "use_gru", "last_seen",
    "code_features",
)  # fmt: skip
KINDS: dict[str, tuple[str, dict[str, tuple[str, ...]]]] = {
    "pretrained_tokenizer_path": ("tokenizer", {"tokenizer_config": TOKENIZER_SHAPE}),
    "pretrained_mask_predictor_path": (
        "mask_predictor",
        {"tokenizer_config": ("n_codes",), "mask_predictor_config": PREDICTOR_SHAPE},
    ),
}
EARLIER = {"mask_predictor_config.kind": "masked"}
"""Values of keys that files of earlier versions do not have."""


class Reconstructor:
    """Predicts what agents do not see, from what they see and have seen.

    Missing nodes of all slots and agents are predicted in one call. The last bits of a prediction depend on what else
    is predicted in the same step (the order of sums depends on sizes), and on nothing else. Storing the result makes
    learning independent of that.

    Args:
        tokenizer, predictor: trained; they are frozen and put into eval mode in place. config: for `decode`,
            `acting_precision`. info: of an environment with a layout.

    Attributes:
        seconds, calls, frames: time spent in `step`, its calls, and frames with a missing node, since construction.

    Errors: UserError for a predictor that was trained with another tokenizer.
    """

    predictor_type: ClassVar[type[nn.Module]] = MaskPredictor
    shape_keys: ClassVar[tuple[str, ...]] = ("kind", *PREDICTOR_SHAPE)
    training_fields: ClassVar[tuple[str, ...]] = ("obs", "full_obs")
    has_beliefs: ClassVar[bool] = True

    def __init__(self, tokenizer: Tokenizer, predictor: MaskPredictor, config: Config, info: EnvInfo) -> None:
        assert info.layout is not None
        self.tokenizer = tokenizer.eval().requires_grad_(False)
        self.predictor = predictor.eval().requires_grad_(False)
        self.layout, self.n_agents = info.layout, info.n_agents
        self.device = predictor.table.device
        self.mean, self._draws = (config.mask_predictor_config.decode == decode for decode in ("mean", "sample"))
        self._seed = config.seed
        require_one_pretraining(tokenizer, predictor)
        self.seconds, self.calls, self.frames = 0.0, 0, 0
        self._bf16, self._gives_beliefs = config.acting_precision == "bf16", config.belief_inputs
        self.columns = GraphTables(self.layout, self.device)
        self._frozen: tuple[FrozenTokenizer, FrozenPredictor] | None = None
        self._version = -1
        self._compiled: CompiledTick | None = None
        self.begin(0)

    @classmethod
    def new_predictor(cls, config: Config, info: EnvInfo) -> MaskPredictor:
        """Return an untrained predictor."""
        assert info.layout is not None
        n_codes = config.tokenizer_config.n_codes
        return MaskPredictor(config.mask_predictor_config, n_codes, info.layout, info.episode_limit)

    @property
    def field(self) -> str:
        """Name of the stored field: `recon` float16 [n, obs_dim] under `decode: mean`, else `tokens` int16 [n, N]."""
        return "recon" if self.mean else "tokens"

    def _frozen_predictor(self) -> FrozenPredictor:
        return FrozenPredictor(self.predictor, self._bf16, self.layout.position if self._gives_beliefs else None)

    def frozen(self) -> tuple[FrozenTokenizer, FrozenPredictor]:
        """Return both modules for acting with their current weights; the same objects until these change."""
        modules = self.tokenizer, self.predictor
        version = sum(value._version for module in modules for value in module.state_dict(keep_vars=True).values())
        if self._frozen is None or version != self._version:
            self._frozen = FrozenTokenizer(self.tokenizer), self._frozen_predictor()
            self._version, self._compiled = version, None
        return self._frozen

    def begin(self, n_slots: int) -> None:
        """Start with empty histories in `n_slots` slots, and with the current weights of both modules."""
        frozen = self.frozen()
        config, specials = self.predictor.config, self.predictor.specials
        shape = (n_slots, self.n_agents, self.layout.n_nodes)
        self._history = SlotHistory(shape, config, specials, self.device)
        self._noise = EpisodeNoise(self._seed, shape, self.device) if self._draws else None
        if self._compiled is None or self._compiled.n_slots != n_slots:
            kind = compiled_tick() if self.has_kernels else None
            parts = self.layout, self.n_agents, n_slots, *frozen
            self._compiled = None if kind is None else kind(*parts)

    @property
    def has_kernels(self) -> bool:
        """Whether `compiled.py` computes the same."""
        here = self.device.type == "cpu" and self.predictor.table.dtype == torch.float32
        return here and self.mean and not self.predictor.config.use_gru

    @torch.inference_mode()
    def reset(self, which: np.ndarray) -> None:
        """Clear the histories of the slots `which` [B] bool, where episodes start."""
        slots = torch.as_tensor(which, device=self.device)
        self._history.reset(slots)
        if self._noise is not None:
            self._noise.reset(slots)

    def renew(self, which: np.ndarray, rng: np.random.Generator) -> None:
        """Draw by `rng` in the episodes that have begun in the slots `which` [B] bool; see `sampling.py`."""
        if self._noise is not None:
            self._noise.renew(which, rng)

    @torch.inference_mode()
    def step(
        self,
        obs: np.ndarray | Tensor,
        step: np.ndarray | Tensor,
        active: np.ndarray | Tensor | None = None,
        last_action: np.ndarray | Tensor | None = None,
    ) -> Reconstruction:
        """Reconstruct one tick: obs [B, n, obs_dim] float32 at `step` [B] of the episodes. Called once per tick.

        active: [B] bool, slots that have made a step; None: all. The other slots keep their histories, and their
            observations pass unchanged. last_action: not read.
        """
        start = time.perf_counter()
        if self._compiled is not None:
            result = self._by_kernels(self._compiled, obs, step, active)
            self.calls += 1
            self.seconds += time.perf_counter() - start
            return result
        obs = torch.as_tensor(obs, device=self.device)
        now = torch.as_tensor(step, device=self.device).long()
        if active is None or active.all():
            result = self._tick(obs, now, self._history)
        else:
            slots = torch.as_tensor(active, device=self.device).nonzero().flatten()
            part = self._history.take(slots)
            result = self._tick(obs[slots], now[slots], part, slots).among(obs, slots)
            self._history.put(slots, part)
        self.calls += 1
        self.seconds += time.perf_counter() - start
        return result

    def _by_kernels(
        self,
        tick: CompiledTick,
        obs: np.ndarray | Tensor,
        step: np.ndarray | Tensor,
        active: np.ndarray | Tensor | None,
    ) -> Reconstruction:
        """Return the result of `step`, computed by kernels: the same bits."""
        filled = np.array(obs.numpy() if isinstance(obs, Tensor) else obs, np.float32, order="C")  # a copy
        now = np.ascontiguousarray(step, np.int64)
        slots = np.arange(len(filled)) if active is None else np.asarray(active).nonzero()[0]
        stored, guessed, frames, doubt = tick(filled, now, slots, self._history)
        self.frames += frames
        result = torch.from_numpy(filled), torch.from_numpy(guessed)
        fields = {self.field: torch.from_numpy(stored)}
        if doubt is not None:
            played = torch.zeros(len(filled), dtype=torch.bool)
            played[slots] = True
            seen = (result[0] != 0).any(-1, keepdim=True) & played[:, None, None] & ~result[1]
            fields[FIELD] = input_columns(seen, result[1], self._history.ages(torch.from_numpy(now)), doubt)
        return Reconstruction(fields, *result)

    @torch.no_grad()
    def restore(self, data: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Return (reconstructed obs [..., n, obs_dim], guessed [..., n, N]), the same bits as `step` gave.

        data: `obs` and the field that `step` asked to store.
        """
        obs, stored = data["obs"], data[self.field]
        columns = self.columns if obs.device == self.device else GraphTables(self.layout, obs.device)
        missing = columns.sight(obs)[1]
        return self.filled(obs, stored, missing, columns), missing

    def snapshot(self) -> dict[str, Tensor]:
        """Return the histories of all slots."""
        return {**self._history.snapshot(), **({} if self._noise is None else self._noise.snapshot())}

    @torch.inference_mode()
    def load_snapshot(self, snapshot: dict[str, Tensor]) -> None:
        """Continue from a `snapshot` of as many slots."""
        self._history.restore(snapshot)
        if self._noise is not None:
            self._noise.restore(snapshot)

    def _tick(self, obs: Tensor, now: Tensor, history: SlotHistory, slots: Tensor | None = None) -> Reconstruction:
        """Reconstruct obs [B, n, obs_dim] at steps `now` [B] of the slots of `history`, which advances by this step.

        slots: [B], their numbers; None: all.
        """
        seen, missing = self.columns.sight(obs)
        history.push(self._tokens(obs, seen))
        stored, doubt = self.blank(tuple(missing.shape)), None
        rows = missing.flatten(0, 1).any(-1).nonzero().flatten()
        if len(rows):
            guess = self._guess(rows, missing, now, history, slots)
            stored, doubt = self._stored(missing, guess), guess.doubt
            obs = self.filled(obs, stored, missing, self.columns)
        else:
            obs = obs.clone()
        fields = {self.field: stored}
        if self._gives_beliefs:
            fields[FIELD] = input_columns(seen, missing, history.ages(now), doubt or nothing(obs))
        history.commit(now)
        return Reconstruction(fields, obs, missing)

    def blank(self, shape: tuple[int, ...]) -> Tensor:
        """Return the stored field where nothing is guessed; `shape`: (B, n, N)."""
        if not self.mean:
            return torch.full(shape, -1, dtype=torch.int16, device=self.device)
        return torch.zeros((*shape[:-1], self.layout.obs_dim), dtype=torch.float16, device=self.device)

    def _tokens(self, obs: Tensor, seen: Tensor) -> Tensor:
        """Return the tokens [B, n, N] of the nodes of obs [B, n, obs_dim], MASK where they are not `seen`."""
        assert self._frozen is not None
        ids = torch.full(seen.shape, self.predictor.specials.mask, device=self.device)
        where = seen.flatten().nonzero().flatten()
        nodes = self.columns.nodes(obs).flatten(0, -2).index_select(0, where)
        ids.view(-1).index_copy_(0, where, self._frozen[0](nodes))
        return ids

    def _guess(self, rows: Tensor, missing: Tensor, now: Tensor, history: SlotHistory, slots: Tensor | None) -> Guess:
        """Predict the missing nodes of the agents `rows` [F] of B·n, at steps `now` [B]."""
        assert self._frozen is not None
        self.frames += len(rows)
        which = missing.flatten(0, 1).index_select(0, rows).flatten().nonzero().flatten()
        gumbel = None
        if self._noise is not None:
            size = self.predictor.specials.n_codes + 1
            gumbel = self._noise.gumbel(places(missing, slots), size).to(self.predictor.table.dtype)
        return self._frozen[1](history.frames(rows, now), which, gumbel)

    def _stored(self, missing: Tensor, guess: Guess) -> Tensor:
        """Return the stored field [B, ...]: the guesses of the `missing` [B, n, N] nodes, rounded."""
        where = missing.flatten().nonzero().flatten()
        if not self.mean:
            stored = self.blank(tuple(missing.shape))
            stored.view(-1).index_copy_(0, where, guess.ids.to(torch.int16))
            return stored
        nodes = torch.zeros((missing.numel(), self.layout.node_dim), dtype=torch.float16, device=self.device)
        return self.columns.obs(nodes.index_copy_(0, where, guess.features.half()).view(*missing.shape, -1))

    def filled(self, obs: Tensor, stored: Tensor, missing: Tensor, columns: GraphTables) -> Tensor:
        """Return obs [..., n, obs_dim] with the `stored` values in place of the nodes `missing` [..., n, N]."""
        if self.mean:
            guessed = stored.to(obs.dtype)
        else:
            table = self.predictor.table_with_absent().to(obs.device, obs.dtype)
            guessed = columns.obs(table[torch.where(missing, stored.long(), self.predictor.specials.absent)])
        return torch.where(columns.of_nodes(missing), guessed, obs)


@lru_cache(maxsize=1)
def compiled_tick() -> type[CompiledTick] | None:
    """Return the class that computes a tick by kernels, None where Numba is missing."""

    def load() -> type[CompiledTick] | None:
        from omagd.modules.graph_reconstructers.compiled import CompiledTick

        return CompiledTick

    return compiled_or_reference(load, None)


def describe(config: Config, info: EnvInfo, *, predictor: bool) -> dict[str, Any]:
    """Return the `meta` entry of a saved predictor, or of a saved tokenizer: plain values."""
    return {
        "kind": "mask_predictor" if predictor else "tokenizer",
        "env": info.name,
        "map_name": info.map_name,
        "shape_key": info.shape_key(),
        "tokenizer_config": config.tokenizer_config.model_dump(),
        "mask_predictor_config": config.mask_predictor_config.model_dump(),
    }


def check(meta: object, config: Config, info: EnvInfo, key: str, path: str) -> None:
    """Reject weights of another environment or configuration.

    meta: the file's `meta` entry. key: the configuration key that named the file `path`. Errors: UserError.
    """
    kind, sections = KINDS[key]
    if "mask_predictor_config" in sections:
        shape = REGISTRY.get(config.mask_predictor_config.kind).shape_keys
        codes = {"tokenizer_config": sections["tokenizer_config"]} if "stage1" in pretraining(config) else {}
        sections = {**codes, "mask_predictor_config": shape}
    source = f"{key}={path}"
    if not isinstance(meta, dict) or meta.get("kind") != kind:
        raise UserError(f"{source} is not the file of a trained {kind}; give the one that pre-training wrote")
    if meta["shape_key"] != info.shape_key():
        trained, here = f"{meta['env']} {meta['map_name']}".strip(), f"{info.name} {info.map_name}".strip()
        fix = f"give one that was trained on {here}"
        if trained == here:
            fix = "with other sizes; train it again with these env_args"
        raise UserError(f"{source} was trained on {trained}: {fix}")
    saved, given = (
        {
            f"{section}.{name}": values[section].get(name, EARLIER.get(f"{section}.{name}"))
            for section, names in sections.items()
            for name in names
        }
        for values in (meta, config.model_dump())
    )
    differing = [name for name in saved if saved[name] != given[name]]
    if differing:
        wanted = " ".join(f"{name}={saved[name]}" for name in differing)
        now = " ".join(str(given[name]) for name in differing)
        raise UserError(f"{source} was trained with {wanted}, not {now}; set {wanted}")


def require_one_pretraining(tokenizer: Tokenizer, predictor: nn.Module) -> None:
    """Reject a predictor of another tokenizer, whose codes mean other features. Errors: UserError."""
    if not isinstance(predictor, MaskPredictor):
        return  # reads no codes
    if not torch.allclose(tokenizer.table(), predictor.table, rtol=1e-3, atol=1e-4):
        raise UserError(
            "pretrained_mask_predictor_path belongs to another tokenizer than pretrained_tokenizer_path;"
            " give the two files of one pre-training"
        )
