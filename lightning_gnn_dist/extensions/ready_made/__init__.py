"""PyG's ready-made models, run layer by layer: ``GraphSAGE``, ``GCN``, ``GIN``, ``GAT``, ``PNA`` and ``EdgeCNN``.

    layers_of(gnn)           a module's ``layers()``, in one line: a step on what the seeds need alone

layers.py has a ``Layer`` for each of theirs; that of GCN also ``Prepares``, as it divides by the degrees of a whole
graph. The one such model of a module without ``layers()`` is ``ModelLayers``, too: it answers with rows that are ready.

Worth: a training step of GraphSAGE takes 62 ms on blocks, and 1,339 on all edges of a batch (benchmarks/sampling.md);
an evaluation of a module that has such a model computes each layer once.
"""
