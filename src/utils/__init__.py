"""Tools without knowledge of the method: errors, registries, seeds, clocks, ranks, packed rows, files, logs."""
