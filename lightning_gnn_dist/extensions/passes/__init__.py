"""Passes over the layers of a model whose rows may lie on a device, in RAM or in files, and of which ranks hold parts.

    predict_by_layer(trainer, model, graph, "rows.npy")    rows of all nodes, of graphs and shards of any size

layer_pass.py  the pass of the core in a budget: larger or smaller batches, as those before have shown, of own nodes of
               a graph in files that every rank has; those of shards are in their extension
row_table.py   where rows lie, wherever is room for them, and how they get to a device and back
part_batch.py  batches of a part, for boundaries whose layers read rows of other ranks
prediction.py  the rows of all nodes, in one file that ranks share

Shards, exchange, history, links and serving use it. Worth: all rows of a graph that RAM does not hold, each computed
once.
"""
