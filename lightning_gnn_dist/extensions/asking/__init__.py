"""Questions from rank to rank, which a rank answers at any time, whatever its training does.

    Asking(channel, answer).ask(kind, questions, meanwhile)

asking.py  the questions and their answers, on sockets of their own
turns.py   work that stops where it must be told something, so that several pieces of it ask together

Shards and learned tables ask by it for rows that other ranks have. It needs no other extension.
"""
