"""Mixture of experts: routing, sorting of tokens by expert, grouped GEMM, sum of the experts' results."""
