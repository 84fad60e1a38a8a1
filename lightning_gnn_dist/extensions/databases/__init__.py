"""What a model knows of the tables of a database: encoders of columns, and heads of tasks.

column_encoder.py   the rows of each type of nodes, from the columns of its table
task_head.py        what a model says about the questions of a task, with its loss and its metrics

They are modules of torch, which a user's model has, and nothing asks for them; they need no other extension.
"""
