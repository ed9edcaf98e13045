"""StarCraft II: the environments (`sc2_env`), back-ends (`backend`, `v2_backend`), and one game process (`game`).

`client` is the connection, `install` finds games and maps.
"""
