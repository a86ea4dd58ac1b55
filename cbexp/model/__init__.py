"""From a model's name to weights on a device: architecture, dtype, attention, memory, adapter."""
