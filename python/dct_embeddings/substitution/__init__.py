"""Distributed equivalent substitution: partial results are sent, not the rows they are made of.

Reading order: operators (those with such a substitute), feature_rows (who owns which row), id_table
and dynamic_rows (rows that appear in training), dynamic_state (their checkpoints), aggregation
(partial results, added up), substitution (the layer).
"""
