"""Answers questions about nodes while training is over: what may be asked, how it is computed, and who waits."""
