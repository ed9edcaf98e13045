"""`python src/main.py [options] with key=value …`; see `--help`."""

import sys
from pathlib import Path

if __name__ == "__main__":
    here = Path(__file__).resolve().parent
    # Python puts this folder first, where `learners` would be a second package beside `omagd.learners`.
    sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != here]
    try:
        import omagd
    except ModuleNotFoundError as error:
        if error.name != "omagd":
            raise
        sys.exit(f"error: the package omagd is not installed in {sys.executable}: pip install -e {here.parent}")
    if (installed := Path(omagd.__file__).resolve().parent) != here:
        sys.stderr.write(f"warning: running the installed omagd in {installed}, not the files in {here}\n")
    from omagd.run.cli.main import main

    sys.exit(main())
