"""Experiments on rollout generation with transformers' continuous batching, and the engine that makes it fast."""
