"""Implements bench.link, which trains over throttled links."""
