"""From a dataset's name to prompts, their answers and the verifier that judges completions."""
