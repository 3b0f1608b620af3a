"""Distributed equivalent substitution: partial results cross, not the rows that they are made of.

Reading order: operators (what has such a substitute), feature_rows (who owns which row), id_table
and dynamic_rows (rows that appear in training), dynamic_state (what is saved of them), aggregation
(partial results, added up), substitution (the layer).
"""
