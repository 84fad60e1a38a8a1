"""Answers questions about nodes while training is over, by HTTP, also about new ones: ``lightning-gnn-dist serve``.

command.py          what the command line gives, a ``Trainer`` with a method ``serve``, by the name "serve"
app.py              the server: who waits, for how long, and what is refused
question.py         what may be asked, and how much of it, ``Limits``
answering.py        rows of the nodes that are asked for, by one call of the model
extended_graph.py   a graph with the new nodes and edges of requests, which nobody else sees

It draws from rows that have owners as shards have, by time too, and so needs the folders ``shards``, ``asking``,
``larger_than_memory`` and ``temporal``.
"""
