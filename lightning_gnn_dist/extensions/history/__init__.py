"""Rows of nodes outside a part as their owners computed them at the last meeting: between meetings nothing is sent.

    PartitionedDataModule(graph, boundary=History())   # with a strategy of rounds

boundary.py        ``History``, and what it does not go with
kept_rows.py       the hook of meetings that has rows computed, and refuses parts that change within a round
meeting_rows.py    which rows a rank needs, how ranks compute them at meetings, and layers on batches that read them

It comes in as a ``Boundary``, which brings a hook of meetings. ``passes`` computes the rows.
"""
