"""Fixtures of the kernels, for the tests that multiply by them here."""

from tests.ops.conftest import device, half, hopper, seeded

__all__ = ["device", "half", "hopper", "seeded"]
