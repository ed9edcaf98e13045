"""Tools for many runs and for looking at them; a run needs none of them."""
