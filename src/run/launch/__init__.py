"""Starts the processes of a run, watches them and says how they ended."""
