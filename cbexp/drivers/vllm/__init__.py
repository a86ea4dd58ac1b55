"""vLLM's offline engine, in a process of its own and under an interpreter of its own."""
