"""What strategies of rounds share."""
