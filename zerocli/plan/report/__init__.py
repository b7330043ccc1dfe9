"""What a user is told: the verdict as text and JSON, and the preflight of a run."""
