"""Ranks that begin inside a call of the trainer, where there is no script to run again: in a notebook, at a prompt.

function_launcher.py   starts all ranks for one call, as processes of this one, which is none of them
rank_processes.py      the processes, and how each ended
rank_life.py           what each of them does from its start to its end
rank_work.py           the call of the trainer, as each rank does it
kept.py                what comes back of it

A user asks for it by ``Launch(start_method="forkserver")``, and gets it in a notebook.
"""
