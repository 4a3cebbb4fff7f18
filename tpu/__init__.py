"""Planning a TPU run ahead of time, and launching it."""
