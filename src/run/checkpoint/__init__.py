"""Checkpoints: saving the state of a run, finding it again, and restoring it."""
