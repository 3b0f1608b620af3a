"""The click model: mlp and dlrm; row_exchange and sharded, a DLRM whose tables are sharded."""
