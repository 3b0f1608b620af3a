"""What is trained.

Reading order: mlp and dlrm; factorised (LR, FM, DeepFM); row_exchange and sharded (a DLRM of whose
tables every rank has some, once or in replicas); substituted (any of them, every rank with some
rows of all tables).
"""
