"""Splits by time, and what data modules refuse of samplers that draw by it."""
