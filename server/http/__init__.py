"""The HTTP API, in OpenAI's shapes: what a front end answers.

app.py                                           the application: all routes, the API key, error responses
completions.py, chat.py, tokenize.py, status.py  one family of routes each
request_bodies.py, params.py                     decode and check a request
service.py                                       what the routes need of the process; makes engine requests
job.py, generation.py                            run a request's choices and turn outputs into text and events
responses.py, errors.py                          send JSON or server-sent events, until the client disconnects
logprobs.py, health_report.py, prometheus.py     the JSON of log probabilities, the text of /health and /metrics
"""
