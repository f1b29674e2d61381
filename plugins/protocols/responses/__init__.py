"""POST /v1/responses and /v1/responses/input_tokens, OpenAI's Responses API without state.

body.py     the requests
input.py    its items as the messages of a chat template
tools.py    the tools that are offered to the model, and those that are not
output.py   the items of the answer, from a parser's events
writer.py   the response, whole or as events
handler.py  the routes: from a request to a Conversation
"""
