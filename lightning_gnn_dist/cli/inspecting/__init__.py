"""What ``inspect`` says where an option asks for it."""
