"""What does a mixer do to the sequence? The matrix M of every head, with output = M x value."""

from .base import FAMILIES, Captured, Family, register

__all__ = ["FAMILIES", "Captured", "Family", "register"]
