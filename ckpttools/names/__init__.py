"""Names: the same tensors as another program calls and cuts them. Pure; maps are data files. Start with `maps` and `convert`.

A map says how names of one side stand for names of the other; what it does to values is splits, joins, permutations and
transposes, so a converted tensor is the source's pieces in other places (`moves`), and nothing is computed.
"""
