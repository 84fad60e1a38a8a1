"""Databases: folders of tables with keys become graphs with tasks; encoders of their columns, and heads of the tasks.

    prepare_graph("shop", "shop_graph")   # a folder with database.yaml, or RelBench's

database.py         rows become nodes, keys edges, and questions nodes with answers; found by the name of a file
manifest.py         what a folder says of its tables; connection.py makes one of SQLite and PostgreSQL
columns.py          what keys, times and the other columns of a table are; questions.py the tables of tasks
column_encoder.py   the rows of each type of nodes, from the columns of its table
task_head.py        what a model says about the questions of a task, with its loss and its metrics

The last two are modules of torch, which a user's model has. The rest comes in by the names of files that ``prepare``
finds, and by "task of a database" of ``names.EXTENSIONS``; what is recommended needs ``links`` and ``temporal``.
"""
