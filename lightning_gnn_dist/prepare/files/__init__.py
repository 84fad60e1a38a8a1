"""Readers: tables, Parquet, arrays and archives."""
