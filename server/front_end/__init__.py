"""The front end process: answers HTTP, and is a client of the engine processes.

main.py starts the process and serves the application of server/http/ on the connections that the supervisor passes
(receiver.py), each within its limits (connections.py). EngineClient (engine_client.py) chooses a replica for each
request (routing.py), sends the request over that replica's EngineLink (engine_link.py), and delivers outputs to the
request's group.
server/http/ imports this room; of this room only main.py imports server/http/.
"""
