"""A pair of PyG's ``FeatureStore`` and ``GraphStore``, of which a graph is made.

    Graph.from_pyg((feature_store, graph_store))

contents.py   what the two hold of each type, asked for in bounded pieces

It comes in by the name "stores", as a function from the pair to the arrays of each type, and needs no other extension.
"""
