"""The engine process: receives requests from the front ends, steps the engine, and sends outputs back.

main.py is the process and its loop, channel.py the sockets, output_routes.py the open requests of each front end, and
prober.py the steps that prove an idle engine healthy. Each replica has one engine process.
"""
