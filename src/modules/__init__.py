"""Neural modules: agents, mixers, graph reconstructers."""
