"""Battles with SMAC's semantics: written once, above the back-end interface that simulator and real game share."""
