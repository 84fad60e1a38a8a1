"""Edges as what is learned and judged: links to be told from false ones, edges with labels, what a task recommends.

    LinkDataModule(split_edges(graph), boundary=Fetch())   # a ``Task`` whose seeds are positions of edges

link_split.py       held edges and the graph of the others: how they are chosen, saved, and what is refused of them
edges.py            the edges of a type, and what they show of others
link_datamodule.py  the data module; task.py is its ``Task``, and that of what a database recommends
link_sampler.py     a ``Sampler`` that draws around both ends of targets; negatives.py has the false ones
ranking.py          metrics of ranks among false edges; the best receivers of some questions, and a head that recommends

It needs ``temporal``, by whose times edges are split, and ``asking``. Links in shards stand with these.
"""
