"""The trainer: configuration, optimizer, step, checkpoints, loop."""
