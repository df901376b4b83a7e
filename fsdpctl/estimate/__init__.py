"""What a configuration will need, before it runs."""
