"""Stages, shards and sizes: arithmetic without torch."""
