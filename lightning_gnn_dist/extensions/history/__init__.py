"""Rows of nodes outside a part as their owners computed them at the last meeting: between meetings nothing is sent.

    PartitionedDataModule(graph, boundary=History())   # with a strategy of rounds

history.py has which rows a rank needs, how ranks compute them at meetings, and layers on batches that read them. It
comes in as a ``Boundary``, which brings a hook of meetings. ``passes`` computes the rows.
"""
