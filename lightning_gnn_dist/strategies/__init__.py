"""The strategies, which say how ranks exchange what they learned: one file for each method."""
