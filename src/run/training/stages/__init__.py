"""Training stages: tokenizer (stage 1), mask predictor (stage 2), reinforcement learning (stage 3)."""
