"""The participant that accepts queries over HTTP and streams journals to clients."""
