"""What ranks say to each other, and how they find each other."""
