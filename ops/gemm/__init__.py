"""Matrix products: few rows, many rows, quantized weights."""
