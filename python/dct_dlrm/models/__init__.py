"""What is trained.

Reading order: mlp and dlrm; factorised (LR, FM, DeepFM); sharding, row_exchange and hybrid (a DLRM
of which every rank has a part); two_dimensional (of which there are several such); substituted (any
of them, every rank with some rows of all tables).
"""
