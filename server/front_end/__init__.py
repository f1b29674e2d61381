"""The front end process: answers HTTP, and is a client of the engine processes.

main.py starts the process and serves the application of server/http/ on the connections that the supervisor passes
(receiver.py), each within its limits (connections.py), and notices clients that leave (http_protocol.py, peer.py).
EngineClient (engine_client.py) chooses a replica for each request (routing.py), sends the request over that replica's
EngineLink (engine_link.py), and delivers outputs to the request's group (request_group.py). With tracing, what is
recorded of a request (request_trace.py) is sent to a collector when the request has ended (trace_exporter.py,
otlp_spans.py, otlp_http.py).
server/http/ imports this package; in this package, only main.py imports server/http/.
"""
