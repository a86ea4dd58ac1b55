"""What is decided before a weight is loaded: the plan, the cache's size, the dry run."""
