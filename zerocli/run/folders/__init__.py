"""The run folder: who holds it, and where a run that does not begin fresh starts."""
