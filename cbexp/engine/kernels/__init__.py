"""Triton kernels of the decode step: its modules need Triton, the package itself does not."""
