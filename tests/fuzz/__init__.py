"""Random training programs, run on sharded ranks and in plain torch, and compared."""
