"""The comparison that the method lives by: agents on what they see, on what is reconstructed, and on everything.

    python benchmarks/three_way.py --env skirmish --map 5m_vs_6m --t-max 300000 --seeds 1 2 3
        [--arms ff baseline team_obs omagd full_obs]

`baseline` reads `obs`, `omagd` the reconstruction, `full_obs` (an upper bound, not a method) the whole field; same
agent, same seeds, same steps. `ff` has no memory, agents of `team_obs` tell one another what they see. With
`--config=omagd_small` (default) these arms are the presets fog_*.
Gap closed = (omagd - baseline) / (full_obs - baseline) in the last test's win rate. Prints a Markdown table and writes
`three_way.png`. Further words `key=value` go to every run. An asterisk marks a row with a run whose card (what its
result depends on) is not that of the first run: `full_obs` at least, whose agents see more.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from statistics import mean

from runs import play, tests

from omagd.run.reporting.card import Card, marks, read_card

SEES = ["use_graph_reconstruction=False"]
KINDS = {
    "ff": [*SEES, "agent=ff"],
    "baseline": SEES,
    "team_obs": [*SEES, "use_team_obs=True"],
    "omagd": [],
    "full_obs": [*SEES, "use_full_obs=True"],
}
COLOURS = {
    "ff": "#b9a44c", "baseline": "#8893a3", "team_obs": "#6a5acd", "omagd": "#0f8f8a",
    "full_obs": "#d95f3a",
}  # fmt: skip
Curve = list[tuple[float, float, float]]


def draw(curves: dict[str, list[Curve]], title: str, path: Path) -> None:
    """Draw the win rate over environment steps: one line per seed, one colour per kind."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    for kind, runs in curves.items():
        for i, curve in enumerate(runs):
            steps, rates = [row[0] for row in curve], [row[2] for row in curve]
            axes.plot(steps, rates, color=COLOURS[kind], label=kind if i == 0 else None, linewidth=1.8, alpha=0.85)
    axes.set(title=title, xlabel="environment steps", ylabel="share of battles won (greedy test)", ylim=(-0.02, 1.02))
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=150)


def main() -> None:
    """Play every seed of the arms, print the table, draw the picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="omagd_small")
    parser.add_argument("--env", default="skirmish")
    parser.add_argument("--map", default="5m_vs_6m")
    parser.add_argument("--t-max", type=int, default=300_000)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--arms", nargs="+", choices=tuple(KINDS), default=["baseline", "omagd", "full_obs"])
    parser.add_argument("--results", default="results/benchmarks")
    arguments, extra = parser.parse_known_args()
    curves: dict[str, list[Curve]] = {kind: [] for kind in arguments.arms}
    cards: list[tuple[str, Card | None]] = []
    for seed in arguments.seeds:
        for kind in arguments.arms:
            token = f"three_way_{kind}_{arguments.env}_{arguments.map}_seed{seed}"
            common = [
                f"env_args.map_name={arguments.map}",
                f"seed={seed}",
                f"t_max={arguments.t_max}",
                "test_nepisode=256",
            ]
            folder = play(token, arguments.results, arguments.config, arguments.env, [*common, *KINDS[kind], *extra])
            curves[kind].append(tests(folder))
            cards.append((kind, read_card(folder)))
    print(f"| {arguments.env} {arguments.map} | {' | '.join(f'seed {seed}' for seed in arguments.seeds)} | mean |")
    print("|---" * (len(arguments.seeds) + 2) + "|")
    last = {kind: [curve[-1][2] for curve in runs] for kind, runs in curves.items()}
    asterisks, notes = marks([card for _, card in cards], [kind for kind, _ in cards])
    marked = {kind for (kind, _), asterisk in zip(cards, asterisks, strict=True) if asterisk}
    for kind, rates in last.items():
        print(f"| {kind}{'*' * (kind in marked)} | {' | '.join(f'{rate:.3f}' for rate in rates)} | {mean(rates):.3f} |")
    print("", *notes, sep="\n")
    if {"baseline", "omagd", "full_obs"} <= set(last):
        print_gap(last)
    path = Path(arguments.results) / "three_way.png"
    draw(curves, f"{arguments.env} {arguments.map}", path)
    print(path)


def print_gap(last: dict[str, list[float]]) -> None:
    """Print the share of the gap that reconstruction closes."""
    gap = mean(last["full_obs"]) - mean(last["baseline"])
    closed = (mean(last["omagd"]) - mean(last["baseline"])) / gap if gap > 0 else float("nan")
    print(f"\ngap closed: {closed:.2f} (of {gap:.3f} in win rate)")


if __name__ == "__main__":
    main()
