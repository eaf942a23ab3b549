"""What ranks did when, and how much they sent."""
