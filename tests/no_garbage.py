"""Imported first by the server that ranks are forked from: a third of the time of its imports would go to garbage."""

import gc

gc.disable()  # `tests.warm`, the last import, ends it
