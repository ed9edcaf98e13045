"""A runner whose battles, observations, guesses, agents, choices and episodes stay in a device's memory.

Every tick has the same shapes and launches the same work for all slots, so on a GPU it is one CUDA graph, and no value
is read between two ticks. Shapes: B slots, E episodes of a round, L the step limit, n agents, A actions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields
from functools import partial
from importlib.util import find_spec
from itertools import product
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from omagd import controllers, envs
from omagd.components.action_selectors import LOG_PROB, chooses_on_device
from omagd.components.episode_codec import Spec
from omagd.components.slot_kernels import RowWriter
from omagd.config.env_info import EnvInfo
from omagd.config.schema import Config
from omagd.controllers.basic_mac import BasicMAC
from omagd.controllers.graph_mac import NGraphMAC
from omagd.controllers.types import Exploration, Policy
from omagd.envs.factory import validate_env_args
from omagd.envs.protocol import CanBeResident, Outcome, ResidentGame, Seen
from omagd.envs.task_sets import task_set
from omagd.modules.agents.agent import AgentInputs
from omagd.modules.graph_reconstructers import REGISTRY as PREDICTORS
from omagd.modules.graph_reconstructers.token_reconstructor import TokenReconstructor
from omagd.resident.graphs import Captured
from omagd.resident.reconstruction import ResidentReconstruction
from omagd.resident.replay import BlockEpisodes
from omagd.runners.rollout import OF_TASKS, Rollout, row_fields
from omagd.runners.runner import Runner
from omagd.utils.errors import UserError, install
from omagd.utils.packing import EpisodeMeta, Rows
from omagd.utils.seeding import NO_GROUP, Origins

RETURN, LENGTH, END, RESULTS = range(4)
"""Columns of `ResidentLoop.results`: return, length, the tick at which the episode ended, then the game's results."""

GREEDY = -1.0  # an epsilon below every random number
LOOK_EVERY = 8  # ticks between two looks at whether slots still play


class Round:
    """Memory of the E episodes of a round.

    Args:
        fields: of rows, (type, shape) by name. rows: L + 1. columns: of results. episodes: E.

    Attributes:
        rows: name -> [E + 1, L + 1, ...], the episodes. results: [E + 1, columns] float64, as above. seeds, keys:
            [E + 1] int64, of starts and of actions. Idle slots play episode E, which nobody reads.
    """

    def __init__(self, fields: Spec, rows: int, columns: int, episodes: int, device: torch.device) -> None:
        def blank(kind: torch.dtype, *shape: int) -> Tensor:
            return torch.zeros((episodes + 1, *shape), dtype=kind, device=device)

        self.episodes = episodes
        self.rows = {name: blank(kind, rows, *shape) for name, (kind, shape) in fields.items()}
        self.results = blank(torch.float64, columns)
        self.seeds, self.keys = blank(torch.int64), blank(torch.int64)

    def begin(self, origins: Origins) -> None:
        """Take the seeds and keys of the episodes."""
        for kept, given in ((self.seeds, origins.seed), (self.keys, origins.keys)):
            kept[:-1].copy_(torch.from_numpy(given), non_blocking=True)

    @property
    def block(self) -> dict[str, Tensor]:
        """The rows of the E episodes, [E, L + 1, ...] by name."""
        return {name: rows[:-1] for name, rows in self.rows.items()}


class ResidentLoop:
    """Plays episodes of a round in B slots; a slot whose episode has ended takes the next one that has not begun.

    Args:
        game: what is played. mac: acts. info: sizes. episodes: E, of the round. full_obs: whether to record
            `full_obs`. keep: whether to record rows. of: the memory of the round, which loops of other maps share;
            None: its own.
    """

    def __init__(
        self, game: ResidentGame, mac: BasicMAC, info: EnvInfo, episodes: int, full_obs: bool, keep: bool,
        of: Round | None = None,
    ) -> None:  # fmt: skip
        self.game, slots = game, game.n_slots
        self._actor, self._selector, self._dtype = mac.actor, mac.selector, mac.dtype
        self._see_all = full_obs or mac.wants_full_obs
        self._reads_full, self._n_rows = mac.wants_full_obs, info.episode_limit + 1
        reconstructor: TokenReconstructor | None = getattr(mac, "reconstructor", None)
        self._guesses = None if reconstructor is None else ResidentReconstruction(reconstructor, slots)
        device = game.device

        def counts(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int64, device=device)

        fields = self._fields(mac, info, full_obs) if keep else {}
        self.round = of or Round(fields, self._n_rows, RESULTS + len(game.results), episodes, device)
        self._writer = RowWriter(self.round.rows, device)
        self._returned = torch.zeros(slots, dtype=torch.float64, device=device)
        self._epsilon = torch.zeros((), dtype=torch.float64, device=device)
        self._order, self._tick, self._next = counts(episodes + 1), counts(), counts()
        self._seed, self._key, self._step, self._episode = (counts(slots) for _ in range(4))
        self._first = torch.arange(slots, device=device)
        self._playing, self._closing, self._again = (
            torch.zeros(slots, dtype=torch.bool, device=device) for _ in range(3)
        )
        self._chosen = counts(slots, info.n_agents)  # at the next tick the agents' last actions
        self._start = self._actor.init_hidden(slots).detach().clone()
        self._hidden = self._start.clone()
        self._shown: Seen
        self._outcome: Outcome
        self._watch = Watch(device)
        self._work = [self._observe, self._act, self._step_all, self._note, *[self._restart] * (episodes > slots)]
        of_game = self._observe, self._step_all, self._restart
        if game.capturable:
            self._parts: list[Callable[[], None]] = [Captured(self._play_tick, device)]
        else:
            self._parts = [part if part in of_game else Captured(part, device) for part in self._work]

    def _fields(self, mac: BasicMAC, info: EnvInfo, full_obs: bool) -> Spec:
        """Return the fields of rows: (type, shape) by name."""
        found = row_fields(info, full_obs)
        if self._guesses is not None:
            found[self._guesses.field] = self._guesses.stored.dtype, tuple(self._guesses.stored.shape[1:])
        return {**found, LOG_PROB: (torch.float32, (info.n_agents,))} if mac.outputs_logits else found

    @torch.no_grad()
    def play(self, places: np.ndarray, explore: Exploration | None, ticked: Callable[[bool], None]) -> None:
        """Play the episodes at `places` of the round, which has begun. explore: None to act greedily.

        ticked: called before each tick.
        """
        self._begin(places, explore)
        # By the end of m (L + 1) ticks every slot has played m episodes, if there are so many.
        for tick in range(-(-len(places) // self.game.n_slots) * self._n_rows):
            ticked(True)
            self.tick()
            if self._watch.over(tick, self._playing, self._closing):
                break

    def tick(self) -> None:
        """Launch the work of one tick."""
        for part in self._parts:
            part()

    def _begin(self, places: np.ndarray, explore: Exploration | None) -> None:
        order = np.full(len(self._order), self.round.episodes)
        order[: len(places)] = places
        self._order.copy_(torch.from_numpy(order), non_blocking=True)
        self._epsilon.fill_(GREEDY if explore is None else explore.epsilon)
        self._start.copy_(self._actor.init_hidden(len(self._first)))
        for counter in (self._tick, self._closing, self.game.faults):
            counter.zero_()
        self._episode.copy_(self._order[: len(self._first)])
        self._next.fill_(len(self._first))
        self._again.copy_(self._episode < self.round.episodes)
        self._forget()
        self._restart()
        self._playing.copy_(self._again)

    def _play_tick(self) -> None:
        for part in self._work:
            part()

    def _observe(self) -> None:
        self._shown = self.game.observe(self._see_all)

    def _act(self) -> None:
        shown = self._shown
        features, guessed = shown.full if self._reads_full else shown.obs, None
        if self._guesses is not None:
            features, guessed = self._guesses.tick(shown.obs, self._step, self._playing | self._closing)
        q, hidden = self._actor.step(AgentInputs(features.to(self._dtype), self._chosen, guessed), self._hidden)
        actions, beside = self._selector.on_device(q, shown.avail, self._epsilon, self._key, self._step)
        torch.mul(actions, self._playing.unsqueeze(1), out=self._chosen)
        self._hidden.copy_(hidden)
        self._record({
            "obs": shown.obs, "state": shown.state, "avail_actions": shown.avail, "full_obs": shown.full,
            "actions": self._chosen, **beside,
        })  # fmt: skip

    def _step_all(self) -> None:
        self._outcome = self.game.step(self._chosen, self._playing)

    def _note(self) -> None:
        """Write the results of the step, and choose the slots that begin another episode."""
        outcome = self._outcome
        self._record({"reward": outcome.reward, "terminated": outcome.over & ~outcome.truncated})
        self._tick += 1
        self._step += self._playing
        self._returned += outcome.reward
        self._note_ended(outcome)
        # Closing rows are written: these slots take the next episodes, in the slots' order.
        upcoming = self._closing.cumsum(0) + self._next
        self._next.copy_(upcoming[-1])
        following = self._order.index_select(0, (upcoming - 1).clamp_(max=self.round.episodes))
        self._episode.copy_(torch.where(self._closing, following, self._episode))
        self._again.copy_(self._closing & (self._episode < self.round.episodes))
        self._playing.logical_and_(~outcome.over).logical_or_(self._again)
        self._closing.copy_(outcome.over)
        self._forget()

    def _forget(self) -> None:
        """Begin the episode `_episode` of the slots `_again`, but for the game's own part."""
        which = self._again
        for own, each in ((self._seed, self.round.seeds), (self._key, self.round.keys)):
            own.copy_(each.index_select(0, self._episode))
        self._step.masked_fill_(which, 0)
        self._returned.masked_fill_(which, 0)
        self._chosen.masked_fill_(which.unsqueeze(1), -1)
        self._hidden.copy_(torch.where(which.view(-1, 1, 1), self._start, self._hidden))
        if self._guesses is not None:
            self._guesses.reset(which)

    def _restart(self) -> None:
        """Start the game's episodes in the slots `_again`, from `_seed`."""
        self.game.reset(self._again, self._seed)

    def _record(self, values: dict[str, Tensor]) -> None:
        """Write fields of the row of each slot's step."""
        if self._guesses is not None and "obs" in values:
            values[self._guesses.field] = self._guesses.stored
        self._writer.write(values, self._episode, self._step)

    def _note_ended(self, outcome: Outcome) -> None:
        """Write the results of the episodes that have just ended."""
        results = outcome.results()
        columns = [self._returned, self._step, self._tick.expand_as(self._step)]
        columns += [results[name] for name in self.game.results]
        found = torch.stack([column.double() for column in columns], dim=1)
        self.round.results.index_copy_(0, torch.where(outcome.over, self._episode, self.round.episodes), found)


class Watch:
    """Notices that no slot plays any more, while a GPU works on: ticks after that change nothing.

    The host waits every few ticks for what was known at the last look, so it is never far ahead of the GPU, and the GPU
    never waits for the host.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_cpu = device.type == "cpu"
        self._event: torch.cuda.Event | None = None
        if device.type == "cuda" and torch.cuda.is_available():
            self._event = torch.cuda.Event()
            self._busy = torch.ones((), dtype=torch.bool).pin_memory()

    def over(self, tick: int, playing: Tensor, closing: Tensor) -> bool:
        """Return whether it is known that all slots are idle, which are neither `playing` nor `closing` [B] bool."""
        if self._on_cpu:
            return not bool((playing | closing).any())
        if self._event is None or tick % LOOK_EVERY:
            return False
        if tick:
            self._event.synchronize()  # of the last look: the GPU still has the ticks since then to do
            if not bool(self._busy):
                return True
        self._busy.copy_((playing | closing).any(), non_blocking=True)
        self._event.record()
        return False


OVERRIDDEN = "act", "select_actions", "_build_inputs", "_values", "_update_state"
"""Methods of controllers that work on NumPy arrays; a controller with others than these two have cannot act here."""


def acts_here(kind: type) -> bool:
    """Return whether what a controller of this class computes is what `ResidentLoop` does."""
    return issubclass(kind, BasicMAC) and all(
        getattr(kind, name) in (getattr(BasicMAC, name), getattr(NGraphMAC, name)) for name in OVERRIDDEN
    )


def plays_here(kind: type) -> bool:
    """Return whether an environment of this class says itself that it can be played on a device.

    What its base class says is not enough: its rules may differ.
    """
    return "resident" in vars(kind)


class ResidentRunner(Runner):
    """Plays rounds as `ParallelRunner` does, on the device of the agents: the host looks once, when a round is over.

    The same episodes for the same seeds and actions. Random actions differ: they are a function of the episode, its
    step and the agent, so they depend on no other episode. Policies that are no plain controllers (scripts, recorders)
    play in the environment, as with `ParallelRunner`. Episodes are views of memory that the next call uses again.
    They are in the order of their last tick, then of their place in the round.

    The maps of a set are played one after another, each in its part of the slots.
    """

    _made: tuple[tuple[object, ...], list[ResidentLoop]] | None = None  # the last loops, of each map, and for what

    @staticmethod
    def check(config: Config) -> None:
        """Reject what cannot be played on a device. Errors: UserError."""
        env = cast(Any, envs.REGISTRY.get(config.env))
        kind = config.mask_predictor_config.kind
        on_gpu = config.use_cuda and torch.cuda.is_available() and not config.cpu_inference
        problems = {
            "plays in no other process, so not with env_processes=True": config.env_processes,
            f"action_selector={config.action_selector} cannot choose on a device"
            " (omagd.components.action_selectors.SelectorOnDevice)": not chooses_on_device(config.action_selector),
            f"plays the maps of a set in turn, not task_dealing={config.dealing}": (
                task_set(config.env_args.get("map_name")) is not None
                and config.dealing != "round_robin"
                and not config.evaluate
            ),
            "shows agents what they see or everything, so not with use_team_obs=True": config.use_team_obs,
            f"reconstructs with mask_predictor_config.kind=masked, not kind={kind}": (
                config.use_graph_reconstruction and not issubclass(PREDICTORS.get(kind), TokenReconstructor)
            ),
            "reconstructs where it acts, so not with cpu_inference=True and use_graph_reconstruction=True": (
                config.cpu_inference and config.use_graph_reconstruction
            ),
        }
        if not plays_here(env):
            problems[f"env={config.env} cannot be played on a device (omagd.envs.protocol.CanBeResident)"] = True
        elif problem := env.why_not_resident(validate_env_args(config.env, dict(config.env_args)), on_gpu):
            problems[problem] = True
        problems[f"needs numba-cuda on a GPU: {install('gpu')}"] = on_gpu and find_spec("numba_cuda") is None
        if not acts_here(controllers.REGISTRY.get(config.mac)):
            problems[f"mac={config.mac} acts in a way of its own, not as mac=n_mac does"] = True
        for problem, found in problems.items():
            if found:
                raise UserError(f"runner=resident: {problem}. Use runner=parallel")

    def run(
        self,
        policy: Policy,
        *,
        explore: Exploration | None,
        episodes_per_slot: int = 1,
        full_obs: bool = False,
        keep: bool = True,
    ) -> Rollout:
        """Play `episodes_per_slot` episodes for every slot. Arguments and result: as in `Runner.run`."""
        if not isinstance(policy, BasicMAC):
            return super().run(
                policy, explore=explore, episodes_per_slot=episodes_per_slot, full_obs=full_obs, keep=keep
            )
        self.prepare()
        policy.refresh()
        rounds = [self.stream.origins(np.ones(self.env.n_slots, bool)) for _ in range(episodes_per_slot)]
        parts = ([getattr(each, spec.name) for each in rounds] for spec in fields(Origins))
        origins = Origins(*map(np.concatenate, parts))
        loops = self._resident(policy, len(origins.seed), full_obs, keep)
        loops[0].round.begin(origins)
        for task, loop in enumerate(loops):
            if len(places := np.flatnonzero(origins.task == task)):
                loop.play(places, explore, self.ticked)
        self.ticked(False)
        return self._collected(loops, origins)

    def _resident(self, mac: BasicMAC, episodes: int, full_obs: bool, keep: bool) -> list[ResidentLoop]:
        """Return the loops for such rounds, one for each map; they keep their memory from round to round."""
        if self.info.agent_rewards:
            raise UserError("runner=resident: does not record rewards of single agents. Use runner=parallel")
        key = (mac, episodes, full_obs, keep)
        if self._made is None or self._made[0] != key:
            self._made = None  # its memory first
            slots, env = min(self.config.resident_slots or self.env.n_slots, episodes), cast(Any, self.env)
            if self.info.tasks:
                games = env.residents(mac.acting_device, -(-slots // self.info.n_training))
            else:
                games = [cast(CanBeResident, env).resident(mac.acting_device, slots)]
            loops: list[ResidentLoop] = []
            for game in games:
                of = loops[0].round if loops else None
                loops.append(ResidentLoop(game, mac, self.info, episodes, full_obs, keep, of))
            self._made = key, loops
        return self._made[1]

    def _collected(self, loops: list[ResidentLoop], origins: Origins) -> Rollout:
        """Return what was played: the host reads the results of a round at once."""
        rollout, of, names = Rollout(), loops[0].round, loops[0].game.results
        faults = torch.cat([loop.game.faults for loop in loops]).any()
        results = torch.cat([faults.double().unsqueeze(0), of.results[:-1].flatten()]).cpu().numpy()
        if results[0]:
            raise RuntimeError("runner=resident: the environment was given actions that are not available")
        found = results[1:].reshape(of.episodes, -1)
        if not np.isfinite(found).all():
            raise RuntimeError("runner=resident: a return or a result is not finite")
        order = found[:, END].argsort(kind="stable")
        found, lengths = found[order], found[order, LENGTH].astype(np.int64)
        values = {"return": found[:, RETURN], "ep_length": found[:, LENGTH]}
        values |= {name: found[:, RESULTS + i] for i, name in enumerate(names)}
        rollout.n_episodes, rollout.steps = len(found), int(lengths.sum())
        slots, seeds = order % self.env.n_slots, origins.seed[order]
        tasks, groups = origins.task[order], origins.group[order]
        columns: dict[str, Sequence[Any] | np.ndarray] = {"slot": slots, "seed": seeds, "length": lengths}
        if self.info.tasks:
            columns["task"] = [self.info.tasks[task] for task in tasks]
        columns |= {name: values[name] for name in ("return", *names)}
        for task, name in product(np.unique(tasks) if self.info.tasks else (), OF_TASKS):
            values[f"{self.info.tasks[task]}/{name}"] = values[name][tasks == task]
        # Sums in the order of the episodes, as those of other runners.
        rollout.stats = {name: (float(np.add.accumulate(v)[-1]), float(len(v))) for name, v in values.items()}
        rollout.log = Rows(partial(_entry, tuple(columns)), *columns.values())
        if of.rows:
            names_of = {group: str(group) for group in np.unique(groups).tolist()} | {NO_GROUP: ""}
            won = values.get("battle_won", np.full(len(found), np.nan))
            metas = Rows(EpisodeMeta, slots, seeds, tasks, [*map(names_of.get, groups.tolist())], won)
            rollout.episodes = BlockEpisodes(of.block, order, lengths + 1, metas)
        return rollout


def _entry(names: Sequence[str], *row: float | int | str) -> dict[str, float | int | str]:
    """Return an entry of `Rollout.log`."""
    return dict(zip(names, row, strict=True))
