"""`python -m omagd`."""

from __future__ import annotations

import sys

from omagd.run.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
