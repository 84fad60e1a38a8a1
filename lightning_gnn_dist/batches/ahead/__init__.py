"""Batches whose rows lie elsewhere, on other ranks or in files: known before they are due, and asked for ahead."""
