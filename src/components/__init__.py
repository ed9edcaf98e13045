"""Parts of learning: data sources, episode storage, action selection, schedules, targets."""
