"""POST /v1/responses, OpenAI's Responses API without state.

body.py     the request
input.py    its items as the messages of a chat template
tools.py    the tools that are offered to the model, and those that are not
output.py   the items of the answer, from a parser's events
writer.py   the response, whole or as events
handler.py  from a request to a Conversation
"""
