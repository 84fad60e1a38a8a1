"""Rows of nodes outside a part as their owners computed them at the last meeting: between meetings nothing is sent.

    PartitionedDataModule(graph, boundary=History())   # with a strategy of rounds

boundary.py        ``History``, and what it does not go with
meeting_rows.py    which rows a rank needs, how ranks compute them at meetings, and layers on batches that read them

It comes in as a ``Boundary``, whose ``Outside`` a run's meetings refresh. ``passes`` computes the rows.
"""
