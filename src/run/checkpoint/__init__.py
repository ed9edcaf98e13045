"""Checkpoints: what a run saves, where it stands, and how a later start finds and loads it."""
