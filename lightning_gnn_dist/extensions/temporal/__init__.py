"""Times of edges and nodes: a seed sees what was before its own time, at every hop.

    PartitionedDataModule(split_by_time(graph), sampler=TemporalSampler([15, 10]))

temporal_sampler.py  the ``Sampler``, one that ``SeesByTime``: the core finds it as ``names.EXTENSIONS["by time"]``;
                     what is refused of times, and told of them
trees.py             the kernel: a tree for each seed, of a graph that this host has
row_draws.py         for shards and serving: draws from rows that have owners, by time or not, and batches that grow by
                     them hop by hop
times.py             times by their names, as integers, and the order of a graph's edges by them
time_split.py        masks of nodes by time

It needs no other extension.
"""
