"""Tests of beliefs: what is unseen, and what filling it in is worth."""
