"""The commands, one module each; `main` finds and runs them."""
