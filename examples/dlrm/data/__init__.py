"""Where rows come from: features (encoding), criteo and synthetic (sources), dataset (a share)."""
