"""Battles: SMAC's rules over any back-end, and the built-in simulator. README.md says where to begin."""
