"""What the server's processes share: messages, the link to the supervisor, the heartbeat, the metrics table."""
