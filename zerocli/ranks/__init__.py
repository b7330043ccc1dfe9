"""Ranks as processes: how they start, find each other, exchange values, wait and end."""
