"""Snapshots in a run directory: find them, tell which are committed."""
