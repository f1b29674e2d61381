"""The OpenAI API over HTTP: routes, request bodies and responses."""
