"""How text goes through a model: one window loop, losses, memory, compilation."""
