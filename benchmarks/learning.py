"""Whether a configuration learns, and how soon: several seeds, fresh greedy test episodes, CPU seconds.

    python benchmarks/learning.py --config qmix --map 3m --t-max 400000 --seeds 1 2 3 --threshold 0.9
    python benchmarks/learning.py --config smax_qmix --env smax --map 3m --t-max 2000000 --threshold 0.8

Further words `key=value` go to every run. The win rate is that of the last test, greedy, on 256 episodes whose seeds no
training episode has. "Area" is that under the win rate over environment steps (0 to 1). "First" is the first of two
tests in a row that reached the threshold, in environment steps and in CPU seconds from the start of the command to the
end of that test, tests included: the run's own, shared out by wall time. An asterisk marks a row whose card (what its
result depends on) is not that of the first row.
"""

from __future__ import annotations

import argparse
import math
import resource
from statistics import median

from runs import RunError, area, play, tests

from omagd.lab.analysis.groups import differences
from omagd.run.reporting.card import read_card


def first(played: list[tuple[float, float, float]], threshold: float) -> tuple[float, float] | None:
    """Return steps and the share of the wall time when two tests in a row first reached `threshold`."""
    for (t_env, seconds, one), (_, _, other) in zip(played, played[1:], strict=False):
        if one >= threshold and other >= threshold:
            return t_env, seconds / played[-1][1]
    return None


def spent() -> float:
    """Return the CPU seconds of the commands so far."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def main() -> None:
    """Run all seeds and print a Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="qmix")
    parser.add_argument("--env", default="skirmish")
    parser.add_argument("--map", default="3m")
    parser.add_argument("--t-max", type=int, default=400_000)
    parser.add_argument("--test-interval", type=int, default=20_000)
    parser.add_argument("--threshold", type=float, default=0.9)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--results", default="results/benchmarks")
    arguments, extra = parser.parse_known_args()
    name = f"{arguments.env} {arguments.map}, {arguments.config}"
    print(f"| {name} | last win rate | best | area | {arguments.threshold} first reached | steps | CPU |")
    print("|---|---|---|---|---|---|---|")
    last, areas, cards, labels, reached = [], [], [], [], []
    for seed in arguments.seeds:
        words = [f"env_args.map_name={arguments.map}", f"seed={seed}", f"t_max={arguments.t_max}", "test_nepisode=256"]
        words += [f"test_interval={arguments.test_interval}", f"log_interval={arguments.test_interval}", *extra]
        token = f"learning_{arguments.config}_{arguments.env}_{arguments.map}_seed{seed}"
        before = spent()
        try:
            folder = play(token, arguments.results, arguments.config, arguments.env, words)
        except RunError as error:
            print(f"| seed {seed} | failed | | | | | |\n\n{error}", flush=True)
            continue
        played = tests(folder)
        t_env, _, won = played[-1]
        cpu = spent() - before
        cards.append(read_card(folder))
        labels.append(f"seed {seed}")
        mark = "*" if differences(cards[-1], cards[0]) else ""
        last.append(won)
        areas.append(area([row[0] for row in played], [row[2] for row in played], t_env))
        best, soonest = max(rate for _, _, rate in played), first(played, arguments.threshold)
        reached.append(math.inf if soonest is None else cpu * soonest[1])
        when = "never" if soonest is None else f"{soonest[0]:,.0f} steps, {reached[-1]:.0f} s"
        row = f"| seed {seed}{mark} | {won:.3f} | {best:.3f} | {areas[-1]:.3f} | {when} | {t_env:,.0f} |"
        print(f"{row} {cpu:.0f} s |", flush=True)
    if last:
        when = f"{median(reached):.0f} s, slowest {max(reached):.0f} s"
        print(f"| median | {median(last):.3f} | | {median(areas):.3f} | {when} | | |")
        pairs = [(label, differences(card, cards[0])) for label, card in zip(labels, cards, strict=True)]
        print(*(f"* not comparable with the first row: {label}: {text}" for label, text in pairs if text), sep="\n\n")


if __name__ == "__main__":
    main()
