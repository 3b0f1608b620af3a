"""The click model: mlp, dlrm, row_exchange, sharded (sharded tables)."""
