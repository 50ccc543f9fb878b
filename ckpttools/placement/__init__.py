"""Placement: which box of which tensor each rank of a mesh holds. Pure data and arithmetic.

`local` says what a placement is and what a rank holds by it; `assign` makes placements from tensors, a mesh and rules, which
`rules` describes, `rule_files` reads (builtin/ has those that come along) and `infer` finds in how a source was cut.
"""
