"""Where rows come from.

Reading order: features (what a row is), criteo and synthetic (its sources), dataset (a rank's share
of them).
"""
