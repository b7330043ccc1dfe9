"""Stages, shards, flats and the specification of every persistent buffer: arithmetic without torch."""
