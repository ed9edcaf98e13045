"""Time one update of stage 1, the tokenizer, at the sizes of 5m_vs_6m, beside the original's where it is given.

    python benchmarks/stage1_update.py [--peer PATH_OF_THE_ORIGINAL] [--updates 5] [--batch 128] [--config omagd_small]

Both learners get the same random episodes of ragged length (mean about 31 of at most 70) and take turns, each in a
process of its own; times are CPU seconds on one thread, the ratio is the median of all rounds, memory is the most that
the process held, imports included. Prints one JSON line.
"""

from __future__ import annotations

import json
import sys

from graph_updates import parse, run

STORED = 24.2  # batch 128, float32, published sizes, both in one run on a shared Intel Xeon with AVX-512; torch 2.13


def main() -> None:
    """Time and print."""
    result = run("stage1", parse("stage 1", batch=128, updates=3), STORED)
    sys.stdout.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
