"""Means over ranks in fewer bytes, or in the background: what a user passes to a strategy as ``reducer``.

    LLCGStrategy(reducer=Rounded(8))         # a quarter of the bytes; GrappaStrategy takes it, too
    LocalSGDStrategy(reducer=Overlapped())   # the mean of a round travels while the next one trains

reducers.py      these two values, each a ``SendsMeans``; the ``Reducer`` of rounds that they make, with the hook of a
                 meeting whose mean is a round late, and the ``GradientSums`` of Grappa
rounded_mean.py  one mean in few bits, with what was rounded away added to the next
"""
