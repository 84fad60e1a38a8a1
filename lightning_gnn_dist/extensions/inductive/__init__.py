"""Graphs that training has not seen: judged and predicted in place of the one that is learned from.

    PartitionedDataModule(inductive_graph(graph), evaluation=Evaluation(on=graph))

seen.py        the graph to train on where held nodes must not be seen
elsewhere.py   what is judged on another graph, which must have the same types and features
"""
