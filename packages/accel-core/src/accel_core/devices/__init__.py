"""Hardware: one file per kind of device, and the table that chooses among them."""
