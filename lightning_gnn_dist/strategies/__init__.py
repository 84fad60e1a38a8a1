"""How ranks exchange what they learned: one file a method."""
