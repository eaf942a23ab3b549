"""The files of snapshots: their format, and the ranks' way to them."""
