"""The refusal of an architecture."""


class RefusedError(Exception):
    """The architecture cannot be served; the text is a clause that says why, to follow the architecture's name."""
