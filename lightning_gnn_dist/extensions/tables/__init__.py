"""Learned rows of nodes: tables of which a step touches some rows, and of which ranks exchange those alone.

    nn.Embedding(num_nodes, 64, sparse=True)    every rank has all rows
    OwnedEmbedding(num_nodes, 64)               each rank has some, and asks the others for theirs (GrappaStrategy)

learned_tables.py   what strategies ask, a ``ReplicaState``: all tables of a module, in one call of the trainer; and
                    the means of rows in rounds, a ``MeetingHook`` of meetings
owned_embedding.py  the table that no rank holds whole, and what the owners of its rows answer
touched_rows.py     which parameters are tables, and what they cannot be; rows that ranks have touched, on their way to
                    owners and to all: sums and means, of gradients, too, and how these are clipped
lazy_adam.py        Adam that moves the rows of the gradient alone

It comes in as a ``ReplicaState`` by the name "sparse rows", and needs ``asking``.
"""
