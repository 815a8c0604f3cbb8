"""molt_sdk: train LLM agents that are ordinary async Python functions."""
