"""Time one update of stage 2, the predictor, at the sizes of 5m_vs_6m, beside the original's where it is given.

    python benchmarks/stage2_update.py [--peer PATH_OF_THE_ORIGINAL] [--updates 5] [--batch 2] [--config omagd_small]

Both learners get the same random episodes of ragged length (mean about 31 of at most 70) and take turns, each in a
process of its own; times are CPU seconds on one thread, the ratio is the median of all rounds, memory is the most that
the process held, imports included. Prints one JSON line.
"""

from __future__ import annotations

import json
import sys

from graph_updates import parse, run

STORED = 3.1  # batch 2, float32, published sizes, both in one run on a shared Intel Xeon with AVX-512; torch 2.13


def main() -> None:
    """Time and print."""
    result = run("stage2", parse("stage 2", batch=2, updates=5), STORED)
    sys.stdout.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
