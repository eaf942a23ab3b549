"""Plans unmodified scripts, and runs them as planned: the command line."""
