"""dlrm: trains a recommender (DLRM) with and without compressed gradients; `train_dlrm.py --help`.

Reading order: data (where rows come from), models (what is trained), modes (how gradients are
exchanged), traffic (bytes by purpose), training (a pass over batches), loop (one run), comparison
(all runs, and the command), report; options, arguments, launch.
"""
