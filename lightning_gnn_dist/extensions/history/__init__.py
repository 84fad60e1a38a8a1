"""Rows of nodes outside a part as their owners computed them at the last meeting: between meetings nothing is sent.

    PartitionedDataModule(graph, boundary=History())   # with a strategy of rounds

boundary.py        ``History``, and what it does not go with
meeting_rows.py    what a data module asks of it in a run: the own nodes of a part, computed at meetings
historic_rows.py   which rows a rank needs, and the layers on batches that read them
"""
