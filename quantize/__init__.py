"""Writing quantized checkpoints in the standard formats: what `engine quantize` does.

settings.py holds the settings, run.py a run, layer by layer. The algorithms (grid.py, gptq.py, awq.py) work on matrices
only; formats.py defines how quantized weights are stored, output.py how files are written.
"""

if __name__ != "engine.quantize":
    raise ImportError(
        f"this package is installed as `engine.quantize`, but was imported as `{__name__}`: "
        "install the project (`pip install -e .`) and write `import engine.quantize`"
    )
