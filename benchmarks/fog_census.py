"""What agents do not see in scripted battles of skirmish, as a Markdown table: how much there is to reconstruct.

python benchmarks/fog_census.py --episodes 512
python benchmarks/fog_census.py --maps 3m_mixed_sight6 2s3z_sight5
python benchmarks/fog_census.py --episodes 512 --into docs/skirmish.md

Over living units and living observers. Half of the battles give the means of each slot and step, the others are
measured. The scripts take turns: attack_nearest, focus_fire and kiting, and three tenths of their actions are random.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from scripted_table import parser, show

from omagd.envs.actions import random_actions
from omagd.envs.battle.args import SkirmishArgs
from omagd.envs.battle.fog import PRESETS
from omagd.envs.battle.skirmish_env import SkirmishEnv
from omagd.utils.seeding import stream_seed

SCRIPTS = ("attack_nearest", "focus_fire", "kiting")
RANDOM_SHARE = 0.3  # as in the data of stages 1 and 2
COLUMNS = (
    "class",
    "enemies unseen",
    "of these seen before",
    "last seen is off by",
    "map constant is off by",
    "allies unseen",
)
CLASSES = {name: words[0] for words, names in PRESETS.items() for name in names}


class Played(NamedTuple):
    """Battles of one map. T steps, B battles, n agents, U units.

    Attributes:
        place: [T, B, n, U, 2] cells, of each unit from each agent. pair: [T, B, n, U] bool, both live and are not the
            same. seen: [T, B, n, U] bool.
    """

    place: np.ndarray
    pair: np.ndarray
    seen: np.ndarray


def play(map_name: str, episodes: int, seed: int) -> Played:
    """Play `episodes` battles side by side."""
    env = SkirmishEnv(SkirmishArgs(map_name=map_name), episodes)
    rng, n = np.random.default_rng(stream_seed(seed, "script")), env.info.n_agents
    active, turn = np.ones(episodes, bool), np.arange(episodes) % len(SCRIPTS)
    env.reset(active, np.array([stream_seed(seed, "battle", slot) for slot in range(episodes)]))
    steps = []
    while active.any():
        geometry = env.rules().geometry()
        others = geometry.pair & ~np.eye(n, geometry.pair.shape[2], dtype=bool) & active[:, None, None]
        near = geometry.place[0] < env.info.layout.sight
        steps.append((np.moveaxis(geometry.place[1:], 0, -1).copy(), others, others & near))
        chosen = np.stack([env.scripted_actions(script, rng) for script in SCRIPTS])[turn, np.arange(episodes)]
        by_chance = rng.random(chosen.shape) < RANDOM_SHARE
        actions = np.where(by_chance, random_actions(env.observe().avail_actions, rng), chosen)
        active &= ~env.step(actions, active).terminated
    return Played(*map(np.stack, zip(*steps, strict=True)))


def slot_means(played: Played) -> np.ndarray:
    """Return [T, n, U, 2], the mean place by agent, unit and step; of all steps where a step has nobody."""
    count = played.pair.sum(1)[..., None]
    total = np.where(played.pair[..., None], played.place, 0).sum(1)
    overall = total.sum(0) / np.maximum(count.sum(0), 1)
    return np.where(count > 0, total / np.maximum(count, 1), overall)


def census(map_name: str, episodes: int, seed: int) -> tuple[float, ...]:
    """Return what `COLUMNS` name after the class: two shares, two distances in cells (root mean square), a share."""
    played = play(map_name, 2 * episodes, seed)
    fitted = Played(*(values[:, :episodes] for values in played))
    place, pair, seen = (values[:, episodes:] for values in played)
    n = pair.shape[2]
    means, last = slot_means(fitted), np.zeros((*pair.shape[1:], 2))
    known = np.zeros(pair.shape[1:], bool)
    unseen, before, by_last, by_mean = 0, 0, 0.0, 0.0
    for step in range(len(place)):
        missing = pair[step] & ~seen[step]
        missing[..., :n] = False
        at = place[step]
        unseen, before = unseen + missing.sum(), before + (missing & known).sum()
        by_last += ((at - last) ** 2).sum(-1)[missing & known].sum()
        by_mean += ((at - means[step]) ** 2).sum(-1)[missing].sum()
        known |= seen[step]
        last[seen[step]] = at[seen[step]]
    allies = (pair & ~seen)[..., :n].sum() / max(pair[..., :n].sum(), 1)
    errors = (by_last / max(before, 1)) ** 0.5, (by_mean / unseen) ** 0.5
    return unseen / pair[..., n:].sum(), before / unseen, *errors, allies


def rows(maps: list[str], episodes: int, seed: int) -> Iterator[str]:
    """Yield the table line by line."""
    for name in maps:
        shares, before, by_last, by_mean, allies = census(name, episodes, seed)
        cells = name, CLASSES.get(name, ""), f"{shares:.2f}", f"{before:.2f}", f"{by_last:.1f}", f"{by_mean:.1f}"
        yield f"| {' | '.join(cells)} | {allies:.2f} |"


def main() -> None:
    """Play and show."""
    made = parser(__doc__, episodes=512, maps=tuple(CLASSES), known=None)
    args = made.parse_args()
    show(rows(args.maps, args.episodes, args.seed), args, "fog on skirmish", COLUMNS)


if __name__ == "__main__":
    main()
