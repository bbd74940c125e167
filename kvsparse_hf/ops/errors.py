"""Errors of the kernel layer."""

__all__ = ["BackendError"]


class BackendError(ValueError):
    """A backend was asked for by name and cannot run this call (missing package, device, dtype, head size, option)."""
