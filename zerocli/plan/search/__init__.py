"""What to try and what to choose: candidates, `--auto`, `--max`, recomputation."""
