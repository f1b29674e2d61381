"""The model that is served if none is named."""


def demo_model() -> str:
    """Directory of the demo checkpoint that the distribution ships; "" where it was left out."""
    import engine.demo

    try:
        return str(engine.demo.path())
    except FileNotFoundError:
        return ""
