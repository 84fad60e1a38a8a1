"""Passes over the layers of a model whose rows may lie on a device, in RAM or in files, and of which ranks hold parts.

    predict_by_layer(trainer, model, graph, "rows.npy")    rows of all nodes, of graphs and shards of any size

layer_pass.py  the pass of the core in a budget: larger or smaller batches, and rows wherever is room for them
row_table.py   where rows lie; way.py brings them to a device and back, forecast.py learns what a batch takes
nodes.py       the own nodes of a graph in files that every rank has; those of shards are in their extension
part_batch.py  batches of a part, for boundaries whose layers read rows of other ranks
prediction.py  the rows of all nodes, in one file that ranks share

Shards, exchange, history, links and serving use it. Worth: all rows of a graph that RAM does not hold, each computed
once.
"""
