"""A training run: launch, ranks, steps, data, metrics, and how it ends."""
