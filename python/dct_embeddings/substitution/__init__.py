"""Distributed equivalent substitution: ranks send partial results instead of rows.

Reading order: operators, feature_rows (the owners of rows), id_table and dynamic_rows (rows that
appear in training), dynamic_state (their checkpoints), aggregation, substitution (the layer).
"""
