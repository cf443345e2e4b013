"""The participant that answers: the agent loop on the bus. respondent-b is the same with other settings."""
