"""Battles to look at: the HTML page, GIF, MP4 or pictures that show a recording."""
