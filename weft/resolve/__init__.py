"""From a configuration to a plan, and what it will take on this machine or on a cluster."""
