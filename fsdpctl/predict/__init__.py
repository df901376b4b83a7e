"""Memory and time of one step, computed from the plan without torch."""
