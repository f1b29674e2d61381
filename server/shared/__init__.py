"""What the server's processes share: messages, heartbeat, metrics."""
