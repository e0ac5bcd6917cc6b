"""The version of kdist, also read by the build."""

__version__ = "0.1.0"
