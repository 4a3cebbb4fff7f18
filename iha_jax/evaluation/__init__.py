"""What a trained model can do: generation, and benchmarks."""
