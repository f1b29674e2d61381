"""The small demo checkpoint that the distribution ships, so that every command has something to run offline."""

import pathlib

if __name__ != "engine.demo":
    raise ImportError(
        f"this package is installed as `engine.demo`, but was imported as `{__name__}`: "
        "install the project (`pip install -e .`) and write `import engine.demo`"
    )

__all__ = ["path"]


def path() -> pathlib.Path:
    """The directory of the demo checkpoint (config.json, model.safetensors, tokenizer.json, ...).

    Raises FileNotFoundError where the checkpoint was left out, as in a source tree that has not trained it.
    """
    directory = pathlib.Path(__file__).resolve().parent / "engine-demo"
    if not (directory / "config.json").is_file():
        raise FileNotFoundError(f"no demo checkpoint in {directory}: run `python scripts/train_demo.py` to make it")
    return directory
