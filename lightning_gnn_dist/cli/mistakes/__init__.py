"""What is answered to options that are misspelt, or have wrong values."""
