"""Imported first where processes are started over and over: a part of the time of their imports goes to garbage."""

import gc

gc.disable()  # whoever imports this calls gc.enable() in the end
