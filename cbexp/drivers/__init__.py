"""The ways to generate: the engine's own driver, and the same job by other means, for honest comparison."""
