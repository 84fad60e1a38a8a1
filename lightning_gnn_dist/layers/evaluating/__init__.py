"""How an evaluation is done at the least cost, and what it cannot see."""
