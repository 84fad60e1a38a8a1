"""Evaluation that costs what it should: batches as large as memory allows, or each layer once for all seeds."""
