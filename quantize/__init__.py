"""Writing quantized checkpoints in the standard formats: what `engine quantize` does.

settings.py says what is wanted, run.py does it, layer by layer. The algorithms (grid.py, gptq.py, awq.py) know of
matrices only; formats.py knows how numbers are stored, output.py how files are written.
"""

if __name__ != "engine.quantize":
    raise ImportError(
        f"this package is installed as `engine.quantize`, but was imported as `{__name__}`: "
        "install the project (`pip install -e .`) and write `import engine.quantize`"
    )
