"""Every layout that can be read."""
