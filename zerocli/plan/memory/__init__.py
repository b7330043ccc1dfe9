"""The memory of a run: the engine's steps replayed on a ledger, and rows of bytes on every tier."""
