"""Recomputation: activation checkpoints, selective and compiled blocks, and forwards that change state."""
