"""Readers of tables, Parquet, arrays and archives."""
