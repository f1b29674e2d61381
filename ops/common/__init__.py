"""What all kernels share: launches, and instructions that Triton does not expose."""
