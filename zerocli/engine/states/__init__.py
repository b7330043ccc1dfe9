"""States in and out: whole tensors by name, buffers, initial values, averages, a model's own hooks."""
