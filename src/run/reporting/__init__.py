"""What a run leaves for its reader: cards, summaries, plots, profiles, Sacred's record."""
