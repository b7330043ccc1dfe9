"""What a run writes and says: metrics, their writers, the report."""
