"""Battles to look at: the HTML page, GIF or pictures that show a recording."""
