"""The optimizer: update rules, the proof of users' own, parameter groups, and the update on every tier."""
