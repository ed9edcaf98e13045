"""Games of `snakes_3v3` as compiled loops over single boards: the reference's bits, many times faster."""
