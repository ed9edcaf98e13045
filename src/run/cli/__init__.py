"""The command line: reads what was typed, checks it, lists and compares runs, examines the machine."""
