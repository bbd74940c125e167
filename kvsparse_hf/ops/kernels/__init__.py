"""Triton kernels and their launchers. Importing a module of this package needs Triton."""
