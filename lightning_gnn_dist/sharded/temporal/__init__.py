"""Graphs in shards by time: batches around seeds at their times, and what their owners answer."""
