"""The ZeRO engine: units, collectives, updates; what a training loop of one's own imports from."""
