"""What strategies share: starting ranks, rounds and meetings, checkpoints, refusals."""
