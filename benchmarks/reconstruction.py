"""How well the unseen is filled in, beside what needs no learning: held-out episodes, and the trained team's own.

    python benchmarks/reconstruction.py --env skirmish --map 5m_vs_6m
    python benchmarks/reconstruction.py --env smax --map 5m_vs_6m

Runs all stages of `omagd_small` (further words `key=value` go to the run) and prints a Markdown table: mean squared
error of the features of unseen nodes of living observers, slot by slot as the agent receives them.
"""

from __future__ import annotations

import argparse

from runs import play, summary

COLUMNS = {
    "zeros": "error_zeros",
    "slot mean": "error_slot_mean",
    "last seen": "error_last_seen",
    "last seen, else slot mean": "error_last_seen_or_mean",
    "reconstruction": "error",
    "ratio to the best baseline": "error_ratio",
    "dead or unseen (balanced accuracy)": "balanced_accuracy",
    "top-1": "top1",
    "top-5": "top5",
}


def main() -> None:
    """Play one run and print its table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="omagd_small")
    parser.add_argument("--env", default="skirmish")
    parser.add_argument("--map", default="5m_vs_6m")
    parser.add_argument("--results", default="results/benchmarks")
    parser.add_argument("--t-max", type=int, default=100_000)
    arguments, extra = parser.parse_known_args()
    token = f"reconstruction_{arguments.env}_{arguments.map}"
    words = [f"env_args.map_name={arguments.map}", f"t_max={arguments.t_max}", *extra]
    folder = play(token, arguments.results, arguments.config, arguments.env, words)
    stages = summary(folder)["stages"]
    policy = {name.removeprefix("policy_"): value for name, value in stages["stage3"]["values"].items()}
    print(f"| {arguments.env} {arguments.map} | {' | '.join(COLUMNS)} |")
    print("|---" * (len(COLUMNS) + 1) + "|")
    for title, values in (("held-out episodes", stages["stage2"]["values"]), ("the trained team's episodes", policy)):
        print(f"| {title} | {' | '.join(f'{values[name]:.4f}' for name in COLUMNS.values())} |")
    print(f"\n{folder}")


if __name__ == "__main__":
    main()
