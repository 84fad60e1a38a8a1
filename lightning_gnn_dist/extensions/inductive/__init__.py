"""Graphs that training has not seen: judged and predicted in place of the one that is learned from.

    PartitionedDataModule(inductive_graph(graph), evaluation=Evaluation(on=graph))

A graph that is judged must have the same types and features as the one that is trained on.
"""
