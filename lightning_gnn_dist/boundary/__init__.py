"""The edges that leave a part: which nodes come along, and the rows that ranks send each other in every layer."""
