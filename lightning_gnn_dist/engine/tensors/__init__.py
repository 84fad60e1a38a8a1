"""The same draws in torch operators, for graphs on a device."""
