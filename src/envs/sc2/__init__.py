"""The real game: StarCraft II through pysc2, under the battle semantics that all back-ends share."""
