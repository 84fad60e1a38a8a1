"""What ranks must have alike beside their data: the model that they train together."""
