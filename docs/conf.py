"""The site of these pages: `pip install -e '.[docs]'`, then `sphinx-build -W -c docs . site`."""

import sys
from importlib.metadata import version as installed_version
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))  # site_pages

project = "OMAGD"
author = "The OMAGD authors"
release = installed_version("omagd")

extensions = ["myst_parser", "site_pages"]
# The repository is the source, so that the links between pages work here as they do on a code host.
include_patterns = ["docs/**", "*.md", "*/README.md", "research/reconstruction/README.md"]
exclude_patterns = [".*"]
root_doc = "docs/index"
myst_heading_anchors = 4
highlight_language = "text"  # of blocks that name none: commands and output
html_theme = "furo"
html_title = f"OMAGD {release}"
html_show_copyright = False
