"""Battles to look at: records of what happened and of what agents believed, as a page, a GIF or a video."""
