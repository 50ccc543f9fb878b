"""Placement: which box of which tensor each rank of a mesh holds. Pure data and arithmetic; start with `local`."""
