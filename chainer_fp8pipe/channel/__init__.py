"""Arrays from one stage of a pipeline to the next, in one message each."""
