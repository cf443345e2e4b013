"""OpenAI's API in front of the agent."""
