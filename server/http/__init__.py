"""The HTTP API, in OpenAI's shapes: what a front end answers.

app.py                                           the application: all routes, middleware, error responses
access.py, hosts.py, limits.py                   who may use the server: host, origin, API key, limits of a key
request_log.py                                   request IDs and the access log
completions.py, chat.py, tokenize.py, status.py  one family of routes each
request_bodies.py, messages.py, params.py        decode and check a request
conversation.py, tools.py                        what conversation protocols share: how one is built
chat_message.py, chat_tools.py                   messages and tools in the JSON of chat completions
service.py                                       what the routes need of the process; makes engine requests
job.py, generation.py, parsed_output.py          run a request's choices and turn outputs into text and events
choices_writer.py                                writes the answers of completions and chat completions
plugin_routes.py, plugin_writer.py               routes of plugins, whose faults are named
responses.py, errors.py                          send JSON or server-sent events, until the client disconnects
openapi.py, openapi_schemas.py                   GET /openapi.json
page.py                                          GET /: the page of ../page, to talk to the model in a browser
logprobs.py, health_report.py, prometheus.py     the JSON of log probabilities, the text of /health and /metrics
"""
