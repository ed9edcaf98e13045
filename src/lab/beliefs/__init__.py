"""How good beliefs about unseen units are, beside guesses that need no network; `judge` is what runs find by name."""
