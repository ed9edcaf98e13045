"""The judge of a run's beliefs, in stage 2 and at the end of stage 3, beside guesses that need no network."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property, partial
from typing import Any, cast

import torch
from torch import Tensor

from omagd import learners
from omagd.config.checks import pretrained_file
from omagd.config.env_info import EnvInfo
from omagd.config.schema import Config
from omagd.controllers.types import MAC
from omagd.lab.beliefs.baselines import Baselines, fit_baselines
from omagd.lab.beliefs.picture import Fills, filled_by, picture
from omagd.lab.beliefs.table import Believer, belief_values, judge
from omagd.learners.graph_metrics import summarise
from omagd.modules import graph_reconstructers
from omagd.modules.agents.agent import Remembers
from omagd.modules.graph_reconstructers.belief_head import BeliefHead
from omagd.modules.graph_reconstructers.graphs import GraphTables
from omagd.modules.graph_reconstructers.reconstructor import Belief
from omagd.run.checkpoint.weights import PREDICTOR_FILE, load_file
from omagd.run.reporting.metrics import Metrics
from omagd.run.training.judges import Judge, Verdict
from omagd.run.training.stages.base import PretrainedModules
from omagd.run.training.stages.pretraining import in_batches
from omagd.utils.dist_utils import Dist
from omagd.utils.errors import UserError
from omagd.utils.packing import PackedBatch, pack_episodes

KEY = "pretrained_mask_predictor_path"


def learner_of(pretrained: PretrainedModules, config: Config, info: EnvInfo, dist: Dist) -> Any:
    """Return the learner of stage 2 that says what the trained predictor believes."""
    kind = learners.PREDICTORS.get(config.mask_predictor_config.kind)
    return kind(pretrained.predictor, pretrained.tokenizer, config, info, dist)


class HeadBeliefs:
    """What the head believes in the episodes of a batch."""

    def __init__(self, mac: MAC, head: BeliefHead) -> None:
        self.layout, self._mac, self._head = head.layout, mac, head
        mac.agent.eval()  # as it acts; who is judged learns no more

    @torch.no_grad()
    def beliefs(self, batch: PackedBatch) -> tuple[Tensor, Belief]:
        """Return the missing nodes [S, n, N] bool of a batch, and the belief about each."""
        missing = GraphTables(self.layout, batch.device).sight(batch["obs"])[1] & batch.valid_mask[:, None, None]
        return missing, self._head.belief(self._memory(batch), missing)

    @torch.no_grad()
    def filled(self, batch: PackedBatch, episode: int) -> tuple[Tensor, Tensor]:
        """Return an episode's observations [T, n, obs_dim] filled in, and where [T, n, N] bool."""
        obs, missing = map(batch.packing.pad, self._head.filled(batch["obs"], self._memory(batch)))
        return obs[episode], missing[episode]

    def _memory(self, batch: PackedBatch) -> Tensor:
        return cast(Remembers, self._mac.agent).unroll(self._mac.inputs(batch), batch.packing)[1]


class BeliefJudge(Judge):
    """Judges what is believed of units beside baselines, and draws it. See `Judge`."""

    @staticmethod
    def check(config: Config, info: EnvInfo) -> None:
        """Reject a file whose baselines do not fit. Errors: UserError."""
        path = pretrained_file(KEY, config.pretrained_mask_predictor_path, PREDICTOR_FILE)
        if (state := load_file(path, KEY).get("baselines")) is not None:
            Baselines.restored(state, info, torch.device("cpu"), f"{KEY}={path}")

    def predictor(self, learner: Any, batches: Iterable[PackedBatch]) -> Verdict:
        """Return errors on living units beside those of the baselines."""
        return self._verdict(learner, batches, self.baselines)

    def _verdict(self, believer: Believer, batches: Iterable[PackedBatch], baselines: Baselines | None) -> Verdict:
        if baselines is None:
            return Verdict()
        table = judge(believer, batches, baselines, self.session.dist)
        return Verdict(belief_values(table), table)

    @property
    def says_of_units(self) -> bool:
        """Whether stage 2 trains a predictor of units; others have no baselines and no pictures."""
        return hasattr(learners.PREDICTORS.get(self.session.config.mask_predictor_config.kind), "beliefs")

    @cached_property
    def baselines(self) -> Baselines | None:
        """Those that are fitted in stage 2, or come with a predictor that is only evaluated. Read by all ranks."""
        session, pretrained = self.session, self.pretrained
        if session.config.evaluation_only or not self.says_of_units:
            return self._saved_baselines()
        training, validation = (
            partial(in_batches, pretrained.episodes[purpose], session.dist.device)
            for purpose in ("pretrain", "held_out")
        )
        return fit_baselines(training, validation, session.info, session.dist)

    def _saved_baselines(self) -> Baselines | None:
        """Return the baselines in the file of the predictor: the given one, else the run's own; None without any.

        Called by all ranks; rank 0 reads. Errors: UserError for a damaged file.
        """
        if not self.says_of_units:
            return None
        session = self.session
        given, own = getattr(session.config, KEY), session.folder.pretrained("stage2", best=True) / PREDICTOR_FILE
        state, problem = None, ""
        if session.dist.is_main:
            try:
                path = pretrained_file(KEY, given, PREDICTOR_FILE) if given else own
                state = load_file(path, KEY).get("baselines") if path.is_file() else None
            except UserError as error:
                problem = error.message
        state, problem = session.dist.broadcast((state, problem))
        if problem:
            raise UserError(problem)
        if state is not None:
            return Baselines.restored(state, session.info, session.dist.device, f"{KEY}={given or own}")
        session.logger.info(
            f"{given or own} has no baselines: errors on living units and beside baselines are left out"
        )
        return None

    def saved(self) -> dict[str, Any]:
        """Return the baselines, beside which the predictor is judged in later runs too."""
        return {} if self.baselines is None else {"baselines": self.baselines.state_dict()}

    def picture(self, batch: PackedBatch, name: str = "beliefs_stage2", fills: Fills | None = None) -> dict[str, str]:
        """Draw one moment as seen, as filled in and as it was. fills: in place of the predictor."""
        session, pretrained = self.session, self.pretrained
        if not session.dist.is_main or fills is None and not self.says_of_units:
            return {}
        if fills is None:
            kind: Any = graph_reconstructers.REGISTRY.get(session.config.mask_predictor_config.kind)
            fills = partial(filled_by, kind(pretrained.tokenizer, pretrained.predictor, session.config, session.info))
        return {"picture": str(picture(session, fills, batch, name))}

    def team(self, mac: Any) -> Verdict:
        """Return what a head or a predictor believes in greedy episodes; nothing without one, and on sets of maps."""
        session, head = self.session, mac.head
        config, info, dist = session.config, session.info, session.dist
        if info.tasks:  # the head is not asked about units that a map does not have, which judging would count
            return Verdict()
        if head is None and (self.pretrained.predictor is None or not config.use_graph_reconstruction):
            return Verdict()
        batch = self._played(mac, "beliefs")
        if head is not None:
            training, validation = ([self._played(mac, purpose)] for purpose in ("pretrain", "held_out"))
            baselines = fit_baselines(lambda: training, lambda: validation, info, dist)
            believer = HeadBeliefs(mac, head)
            found = self._verdict(believer, [batch], baselines)
            return Verdict(found.values, found.table, self.picture(batch, "beliefs", believer.filled))
        # Without other ranks: it only evaluates, and sums and counts are reduced here.
        judged, metrics = learner_of(self.pretrained, config, info, Dist(device=dist.device)), Metrics()
        metrics.add(judged.evaluate(batch))
        own = Verdict(summarise(metrics.reduce(dist)), files=self.picture(batch, "beliefs"))
        return Verdict.of([own, self._verdict(judged, [batch], self._saved_baselines())])

    def _played(self, mac: Any, purpose: str) -> PackedBatch:
        """Return `graph_pretrain_eval_episodes` greedy episodes over all ranks, in whole rounds of all slots."""
        per_slot = self.session.rounds(self.session.config.graph_pretrain_eval_episodes)
        rollout = self.session.runners[purpose].run(mac, explore=None, episodes_per_slot=per_slot, full_obs=True)
        return pack_episodes(rollout.episodes).to(self.session.dist.device)
