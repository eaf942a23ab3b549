"""The watchdog: a process beside the ranks that says why a job ends."""
