"""The version of the package, which its metadata take from here. A checkout that is not installed has no metadata."""

__version__ = "0.2.0"
