"""What a run leaves for its reader: cards, summaries, profiles, Sacred's record."""

import warnings

# Sacred imports pkg_resources, which setuptools below 82 (pinned for that reason) still has.
warnings.filterwarnings("ignore", message="pkg_resources is deprecated")
