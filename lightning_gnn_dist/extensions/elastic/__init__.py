"""Ranks that may die and come back, between whose meetings nobody waits for the dead.

    TMAStrategy(EverySeconds(30), peers=Elastic())

living_peers.py  what a user passes, ``Elastic``, a ``GathersPeers``: the living ranks as ``Peers``
membership.py    who is alive, by torchft's lighthouse and manager; how long members wait, and what they and their
                 launcher tell each other
launcher.py      ``lightning-gnn-dist elastic``: a lighthouse and ranks on one machine

It comes in as a value of a strategy, and as a command of the command line, and needs no other extension.
"""
