"""Sets of maps that one policy plays: their names, their common shape, and the environment that deals them to slots."""
