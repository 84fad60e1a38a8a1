"""Tests of what a user may add, a folder each, which is deleted with what it tests."""
