"""The engine process: receives requests from the front ends, steps the engine, and sends outputs back.

main.py is the process, its sockets and its loop; pending_requests.py adds requests to the engine, a few per step;
output_routes.py maps requests to front ends; prober.py computes the steps that prove an idle engine healthy. Each
replica has one engine process.
"""
