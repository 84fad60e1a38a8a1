"""The private names of Lightning that strategies have to touch, in one place. Tried with Lightning 2.6."""
