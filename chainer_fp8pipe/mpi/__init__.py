"""What ranks need beside messages, whatever they are exchanged for."""
