"""What the tests of all clients ask for."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import pydantic

PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 12}},
    "required": ["city"],
    "additionalProperties": False,
}
DESCRIPTION = "The weather in a city."
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {"name": "weather", "description": DESCRIPTION, "parameters": PARAMETERS},
}
"""A tool, as OpenAI's chat has it."""

TIME: dict[str, Any] = {
    "type": "function",
    "function": {"name": "local_time", "parameters": PARAMETERS},
}


class Person(pydantic.BaseModel):
    """A person. Bounded, so that a model that writes nonsense comes to an end."""

    model_config = pydantic.ConfigDict(extra="forbid")
    name: Annotated[str, pydantic.Field(max_length=12)]
    age: Annotated[int, pydantic.Field(ge=0, le=150)]
    drinks: Literal["tea", "coffee"]
    likes: Annotated[list[Literal["cats", "dogs"]], pydantic.Field(max_length=2)]


PERSON_JSON = '{"name": "Ada", "age": 36, "drinks": "tea", "likes": ["cats"]}'
ADA = Person(name="Ada", age=36, drinks="tea", likes=["cats"])
