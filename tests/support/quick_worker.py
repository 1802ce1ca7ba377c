"""Imported by workers in processes of their own: see `interpreter.QUICK_WORKER`."""

from support.interpreter import quicken

quicken()


class Quick:
    """Adds nothing to a worker."""
