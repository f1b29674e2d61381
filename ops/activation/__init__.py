"""Activations and the quantization of activations."""
