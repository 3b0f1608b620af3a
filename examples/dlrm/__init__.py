"""dlrm: trains a recommender (DLRM) with and without compression; see `train_dlrm.py --help`.

Reading order: data (loads rows), models, modes (gradient exchange), traffic (bytes by purpose),
training (a pass over batches), loop (one run), comparison (all runs, and the command), report.
Helpers: options, arguments, launch.
"""
