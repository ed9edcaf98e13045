"""Observation graphs, their tokens, and what fills in the tokens that are not seen."""
