"""Questions from rank to rank, which a rank answers at any time, whatever its training does.

    Asking(channel, answer).ask(kind, questions, meanwhile)

Shards and learned tables ask by it for rows that other ranks have. It needs no other extension.
"""
