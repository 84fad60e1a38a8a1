"""A pair of PyG's ``FeatureStore`` and ``GraphStore``, of which ``Graph.from_pyg((features, edges))`` makes a graph.

contents.py   what the two hold of each type, asked for in bounded pieces
"""
