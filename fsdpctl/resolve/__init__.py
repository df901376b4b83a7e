"""What a configuration means on a machine."""
