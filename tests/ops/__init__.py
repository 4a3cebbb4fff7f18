"""Tests of the attention operation."""
