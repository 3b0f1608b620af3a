"""The click model: dlrm, row_exchange, sharded (sharded tables)."""
