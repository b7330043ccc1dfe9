"""`zerocli check`: the same steps unsharded and under every stage and placement, compared."""
