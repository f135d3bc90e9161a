"""Groups, named collectives and their counters."""
