"""Distributed equivalent substitution: ranks send partial results instead of rows."""
