"""What a model knows of the tables of a database: encoders of their columns, and heads of the tasks on them."""
