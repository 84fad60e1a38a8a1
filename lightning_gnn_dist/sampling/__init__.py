"""Seeds of many batches in, many batches out."""
