"""What runs have come to: their folders as tables, statistics over seeds, curves, comparisons and reports."""
