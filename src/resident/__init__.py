"""What runs a whole round or update on a device: `runner=resident`, its replay, and updates as CUDA graphs.

An environment offers its game by `CanBeResident` of `omagd.envs.protocol`. `runner.py` plays a round of it with the
agents, `reconstruction.py` guesses what they do not see, `replay.py` keeps the episodes, and `updates.py` learns from
draws of them. `graphs.py` makes CUDA graphs.
"""
