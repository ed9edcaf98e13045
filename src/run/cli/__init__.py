"""Command line: parse arguments, check the configuration, list and compare runs, examine the machine."""
