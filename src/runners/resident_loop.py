"""A round of episodes that stays in a device's memory: battles, observations, agents, choices and rows.

Every tick has the same shapes and launches the same work for all slots, so on a GPU it is one CUDA graph, and no value
is read between two ticks. Slots whose episodes have ended stay as they are: their closing row is written again.
Shapes: B slots, K episodes of each, E = K B episodes, L the step limit, n agents, A actions.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from omagd.config.env_info import EnvInfo
from omagd.controllers.basic_mac import BasicMAC
from omagd.envs.battle.compiled.resident import Outcome, ResidentBattles, Seen
from omagd.modules.agents.agent import AgentInputs
from omagd.runners.recorder import row_fields
from omagd.utils.seeding import uniform

RESULTS = "battle_won", "battle_draw", "episode_limit", "dead_allies", "dead_enemies"
"""Results of an episode, in the order of the columns of `ResidentLoop.results`."""

RETURN, LENGTH, END = range(len(RESULTS), len(RESULTS) + 3)  # the columns after them
N_COLUMNS = END + 1
GREEDY = -1.0  # an epsilon below every random number
WARM_UP = 3  # ticks before a graph is captured: kernels are compiled and libraries set up by then
LOOK_EVERY = 8  # ticks between two looks at whether slots still play


def choose(q: Tensor, available: Tensor, epsilon: Tensor, seed: Tensor, step: Tensor) -> Tensor:
    """Return [B, n] int64: with probability epsilon an available action, uniformly; otherwise the best one.

    The random numbers of an action are a function of its episode's seed, its step and its agent alone.

    q: [B, n, A]. available: [B, n, A] bool. epsilon: scalar. seed, step: [B] int64.
    """
    best = q.masked_fill(~available, -torch.inf).argmax(dim=-1)
    n = best.shape[1]
    number = 2 * (step.unsqueeze(1) * n + torch.arange(n, device=step.device))
    key = seed.unsqueeze(1)
    wanted = (uniform(number + 1, key) * available.sum(dim=-1)).floor()
    # The available action number `wanted`.
    anything = (available.cumsum(dim=-1) > wanted.unsqueeze(-1)).int().argmax(dim=-1)
    return torch.where(uniform(number, key) < epsilon, anything, best)


class ResidentLoop:
    """Plays K episodes in every slot; a slot whose episode has ended begins its next one at once.

    Args:
        battles: what is played. mac: acts. info: sizes. episodes: K. full_obs: whether to record `full_obs`.
        keep: whether to record rows.

    Attributes:
        rows: name -> [E, L + 1, ...], the episodes; episode e is number e // B of slot e % B.
        results: [E, 8] float64, `RESULTS`, then return, length, and the tick at which the episode ended.
    """

    def __init__(
        self, battles: ResidentBattles, mac: BasicMAC, info: EnvInfo, episodes: int, full_obs: bool, keep: bool
    ) -> None:
        self.battles, self.episodes, slots = battles, episodes, battles.n_slots
        self._actor, self._dtype, self._see_all = mac.actor, mac.dtype, full_obs or mac.wants_full_obs
        self._reads_full, self._n_rows = mac.wants_full_obs, info.episode_limit + 1
        device = battles.device

        def counts(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int64, device=device)

        fields = row_fields(info, full_obs) if keep else {}
        self.rows = {
            name: torch.zeros(episodes * slots, self._n_rows, *shape, dtype=kind, device=device)
            for name, (kind, shape) in fields.items()
        }
        self.results = torch.zeros(episodes * slots, N_COLUMNS, dtype=torch.float64, device=device)
        self._returned = torch.zeros(slots, dtype=torch.float64, device=device)
        self._epsilon = torch.zeros((), dtype=torch.float64, device=device)
        self._seeds, self._tick = counts(episodes, slots), counts()
        self._seed, self._step, self._number, self._slot = (counts(slots) for _ in range(4))
        self._slot += torch.arange(slots, device=device)
        self._playing, self._closing = (torch.zeros(slots, dtype=torch.bool, device=device) for _ in range(2))
        self._last_action = counts(slots, info.n_agents)
        self._start = self._actor.init_hidden(slots).detach().clone()
        self._hidden = self._start.clone()
        self._run_tick = Captured(self._play_tick, device)
        self._watch = Watch(device)

    @torch.no_grad()
    def play(self, seeds: np.ndarray, epsilon: float | None, ticked: Callable[[bool], None]) -> None:
        """Play all episodes. seeds: [K, B] int64. epsilon: None to act greedily. ticked: called before each tick."""
        self._begin(torch.from_numpy(seeds), GREEDY if epsilon is None else epsilon)
        for tick in range(self.episodes * self._n_rows):
            ticked(True)
            self._run_tick()
            if self._watch.over(tick, self._playing, self._closing):
                break

    def _begin(self, seeds: Tensor, epsilon: float) -> None:
        everyone = torch.ones_like(self._playing)
        self._seeds.copy_(seeds)
        self._epsilon.fill_(epsilon)
        self._start.copy_(self._actor.init_hidden(len(everyone)))
        for counter in (self._tick, self._step, self._number, self._returned, self._closing):
            counter.zero_()
        self.battles.faults.zero_()
        self._restart(everyone)
        self._playing.copy_(everyone)

    def _restart(self, which: Tensor) -> None:
        """Start the episode `_number` of the slots `which` [B] bool."""
        self._seed.copy_(torch.where(which, self._seeds.gather(0, self._number.unsqueeze(0)).squeeze(0), self._seed))
        self.battles.reset(which, self._seed)
        self._step.masked_fill_(which, 0)
        self._returned.masked_fill_(which, 0)
        self._last_action.masked_fill_(which.unsqueeze(1), -1)
        self._hidden.copy_(torch.where(which.view(-1, 1, 1), self._start, self._hidden))

    def _play_tick(self) -> None:
        shown = self.battles.observe(self._see_all)
        features = shown.full if self._reads_full else shown.obs
        q, hidden = self._actor.step(AgentInputs(features.to(self._dtype), self._last_action), self._hidden)
        actions = choose(q, shown.avail, self._epsilon, self._seed, self._step)
        actions = actions.masked_fill(~self._playing.unsqueeze(1), 0)
        self._hidden.copy_(hidden)
        self._last_action.copy_(actions)
        outcome = self.battles.step(actions, self._playing)
        self._record(shown, actions, outcome)
        self._tick += 1
        self._step += self._playing
        self._returned += outcome.reward
        self._note_ended(outcome)
        again = self._closing & (self._number < self.episodes - 1)
        self._number += again
        self._playing.logical_and_(~outcome.over).logical_or_(again)
        self._closing.copy_(outcome.over)
        self._restart(again)

    def _record(self, shown: Seen, actions: Tensor, outcome: Outcome) -> None:
        """Write the row of each slot's step."""
        place = (self._number * len(self._slot) + self._slot) * self._n_rows + self._step
        values = {
            "obs": shown.obs, "state": shown.state, "avail_actions": shown.avail, "full_obs": shown.full,
            "actions": actions, "reward": outcome.reward, "terminated": outcome.over & ~outcome.truncated,
        }  # fmt: skip
        for name, rows in self.rows.items():
            rows.flatten(0, 1).index_copy_(0, place, values[name].to(rows.dtype))

    def _note_ended(self, outcome: Outcome) -> None:
        """Write the results of the episodes that have just ended."""
        columns = outcome.won, outcome.draw, outcome.limit, *outcome.dead, self._returned, self._step
        found = torch.stack([column.double() for column in (*columns, self._tick.expand_as(self._step))], dim=1)
        episode = self._number * len(self._slot) + self._slot
        kept = self.results.index_select(0, episode)
        self.results.index_copy_(0, episode, torch.where(outcome.over.unsqueeze(1), found, kept))


class Captured:
    """Runs a function that only launches work of fixed shapes: on a GPU as a CUDA graph, after a few calls."""

    def __init__(self, function: Callable[[], None], device: torch.device) -> None:
        self._function = function
        self._calls_left = WARM_UP if device.type == "cuda" and torch.cuda.is_available() else -1
        self._graph: torch.cuda.CUDAGraph | None = None

    def __call__(self) -> None:
        """Run it once."""
        if self._graph is not None:
            self._graph.replay()
        elif self._calls_left:
            self._calls_left -= 1
            self._function()
        else:
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph, capture_error_mode="thread_local"):
                self._function()
            self._graph.replay()


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
