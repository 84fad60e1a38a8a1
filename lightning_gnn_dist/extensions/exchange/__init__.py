"""Rows that ranks send each other between the layers, in every step: a step on all parts is one on the whole graph.

    PartitionedDataModule(graph, boundary=Exchange(), sampler=WholePartSampler(2))

exchange.py      ``Exchange``, what it does not go with, and the one batch of a pass: which rows ranks need of each
                 other, found out once, and its layers
row_exchange.py  rows sent within a forward, their gradients within the backward, and for how long each is used

It comes in as a ``Boundary``, whose ``Outside`` gives a run its batches. Their class is in ``passes``.
"""
