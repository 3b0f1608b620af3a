"""What is trained.

Reading order: dlrm; sharding, row_exchange and hybrid (a model of which every rank has a part);
two_dimensional (of which there are several such).
"""
