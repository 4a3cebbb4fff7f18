"""Pure functions of arrays: the attention operation and its implementations."""
