"""The residual-state layer: pieces of training state, which tier holds each, and when it moves."""
