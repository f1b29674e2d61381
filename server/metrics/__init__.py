"""The server's metrics: the list of all (metric_list.py), where they come from, and how /metrics writes them."""
