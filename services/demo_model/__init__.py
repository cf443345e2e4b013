"""A small model inside wheels, behind the protocol of an Ollama server: it proves the stack, it is not a good model."""
