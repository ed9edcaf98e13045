"""Training on one rank: builds the parts, runs the stages, evaluates."""
