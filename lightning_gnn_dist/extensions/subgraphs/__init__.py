"""Samplers of subgraphs: batches of all edges among the nodes that walks, or neighbours of a seed, reach.

    PartitionedDataModule(graph, sampler=ShadowSampler([10, 5], num_hops=3))

shadow.py  a graph of its own around each seed
walk.py    the graph among the nodes that walks visit, with weights that make up for how often they do

It needs no other extension.
"""
