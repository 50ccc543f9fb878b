"""Pickle -> inert records, and back; nothing is imported, nothing is called. See `reader` and `records`."""
