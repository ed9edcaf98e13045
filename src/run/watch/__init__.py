"""Battles to look at: recordings of what a policy did, and the HTML page, GIF or MP4 that shows them."""
