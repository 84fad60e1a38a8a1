"""Whether a model sees farther than the batches of its evaluation, by a look at a few seeds before it.

    Evaluation(probe=True)     the default: a line says so where figures are estimates

probe.py   the look; the core finds it as ``names.EXTENSIONS["one hop more"]``

It needs no other extension.
"""
