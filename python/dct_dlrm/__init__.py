"""dct_dlrm: trains a recommender (DLRM) with and without compressed gradients; `dct-train --help`.

Reading order: features (what a row is), criteo and synthetic (where rows come from), dataset (a
rank's share of them), model, modes (how gradients are exchanged), sharding, exchange and hybrid (a
model of which every rank has a part), traffic, loop (one run), report, launch, train.
"""
