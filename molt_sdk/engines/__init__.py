"""Engines: token ids in, sampled ids with logprobs and versions out."""
