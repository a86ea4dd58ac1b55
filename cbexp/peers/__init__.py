"""The same job by other means, for honest comparison: transformers' threaded manager, its `generate`, vLLM."""
