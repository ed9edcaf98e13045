"""Parts of value-based learning: packed batches, replay, action selection, schedules, targets."""
