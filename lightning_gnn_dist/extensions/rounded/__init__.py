"""Means over ranks in fewer bytes, or in the background: what a user passes to a strategy as ``reducer``.

    LLCGStrategy(reducer=Rounded(8))         # a quarter of the bytes; GrappaStrategy takes it, too
    LocalSGDStrategy(reducer=Overlapped())   # the mean of a round travels while the next one trains

reducers.py      these two values, each a ``SendsMeans``
means.py         the ``Reducer`` of rounds that they make, and the hook of a meeting whose mean is a round late
gradients.py     the ``GradientSums`` of Grappa: gradients in few bits while the backward pass goes on
rounded_mean.py  one mean in few bits, with what was rounded away added to the next; codec.py rounds rows
"""
