"""A sweep: plan, what is owed, scheduler, racing, run, confirmation."""
