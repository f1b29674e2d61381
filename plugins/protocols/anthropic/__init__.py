"""Anthropic's Messages API: POST /v1/messages and /v1/messages/count_tokens.

bodies.py             decode a request
conversation.py       its messages as chat templates expect them
options.py            thinking, effort, tools and the format of the answer, as the model's templates allow
blocks.py             the content blocks of an answer from a parser's events
writer.py             the answer, whole or as server-sent events
signature.py          what stands in the signature of a thinking block
errors.py             errors in Anthropic's shape
routes.py             the two routes
"""
