"""Which of some named ways to train takes least time to be as accurate, by what a short probe of a fit measures."""
