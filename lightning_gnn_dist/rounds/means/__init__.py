"""What ranks average when they meet, and what they make of the mean."""
