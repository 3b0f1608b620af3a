"""Embedding tables sharded inside a group of ranks, with replicas across groups.

Reading order: plan (who owns which rows), embedding_bags (the layer), touched_rows (which rows
change), averages (what replicas tell each other about those), replica_sync (when).
"""
