"""Ranks that begin inside a call of the trainer, where there is no script to run again: in a notebook, at a prompt.

launcher.py   forks all ranks for one call; this process is none of them, and gets weights and metrics back

A user asks for it by ``Launch(start_method="fork")``, and gets it in a notebook. It comes in as a launcher of
Lightning's, by the name "ranks of a function", and needs no other extension.
"""
