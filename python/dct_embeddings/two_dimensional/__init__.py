"""Embedding tables sharded inside a group of ranks, with replicas across groups."""
