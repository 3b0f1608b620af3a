"""The click model: mlp, dlrm, columns (split top MLP), row_exchange, sharded (sharded tables)."""
