"""Ranks that begin inside a call of the trainer, where there is no script to run again: in a notebook, at a prompt.

function_launcher.py   starts all ranks for one call, as processes of this one, which is none of them
                       and has each rank do the call of the trainer; what comes back of it
rank_processes.py      the processes: what each of them does from its start to its end, and how it ended
by_value.py            what travels to them, also of classes that only this process has

A user asks for it by ``Launch(start_method="forkserver")``, and gets it in a notebook. It comes in as an ``Elsewhere``,
a launcher of Lightning's, by the name "ranks of a function", and needs no other extension.
"""
