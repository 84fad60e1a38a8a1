"""A graph that no host holds: each rank has a shard, and asks the others for what its batches need of theirs.

    PartitionedDataModule("my_shares")   # a folder with shares.json, as save_shards writes it

index.py          what lies in the folder: where each shard begins, of each type, and a shard
opening.py        what a data module is given: found by the name of its file, in ``names.EXTENSIONS``; and edges of a
                  split, a task
home.py           the ``GraphAccess``: the own shard, and what a boundary brings along, and what an evaluation costs;
                  nodes.py is its pass over the layers, of own nodes
remote_graph.py   the whole graph, whose rows are asked of their owners, and the source of its batches
questions.py      what owners are asked, how they answer, and how batches grow by what they draw
divide.py         ``save_shards``, of a graph that is there, or of a split
one_shard.py      ``prepare_graph(shard=OneShard(0, 4))``: a ``Portion``, with its nodes and edges

It asks for rows ahead by what ``larger_than_memory`` has, and needs that folder, ``asking``, ``links`` and
``temporal``.
"""
