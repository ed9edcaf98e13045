"""Parts of value-based learning: replay, action selection, schedules, targets."""
