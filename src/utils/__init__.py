"""Tools without knowledge of the method: errors, registries, seeds, clocks, distribution, files, logs."""
